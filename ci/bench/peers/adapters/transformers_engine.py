"""transformers in float32. options: model, mode ("one", "static" or "continuous"); batch of the
first two, arguments of `ContinuousBatchingConfig` (continuous) of the last."""

from __future__ import annotations

from typing import Any

from peers.adapters.child import Session, main
from peers.job import Item, Job


def _load(job: Job) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(
        job.options["model"], dtype=torch.float32, local_files_only=True
    ).eval()
    # What a call's own configuration leaves at None is taken from the model's.
    model.generation_config.eos_token_id = None
    return model


class Generate:
    """`generate()` with `batch` requests at a time; a batch runs until its longest output."""

    def __init__(self, job: Job) -> None:
        self._model = _load(job)
        self._batch = job.options["batch"]

    def run(self, items: list[Item]) -> list[list[int]]:
        size = self._batch
        parts = [items[at : at + size] for at in range(0, len(items), size)]
        return [tokens for part in parts for tokens in self._generate(part)]

    def _generate(self, items: list[Item]) -> list[list[int]]:
        import torch
        from transformers import GenerationConfig

        longest = max(len(item.prompt) for item in items)
        ids = torch.zeros(len(items), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):  # padded at the left: new tokens follow the last column
            ids[row, longest - len(item.prompt) :] = torch.tensor(item.prompt)
            mask[row, longest - len(item.prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=max(item.output for item in items),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, generation_config=config)
        rows = out[:, longest:].tolist()
        return [row[: item.output] for row, item in zip(rows, items, strict=True)]

    def close(self) -> None:
        del self._model


class Continuous:
    """transformers' continuous batching: a paged cache and a thread that steps."""

    def __init__(self, job: Job) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        model = _load(job)
        self._context = model.continuous_batching_context_manager(
            generation_config=GenerationConfig(
                do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=job.longest
            ),
            continuous_batching_config=ContinuousBatchingConfig(**job.options["continuous"]),
        )
        self._manager = self._context.__enter__()

    def run(self, items: list[Item]) -> list[list[int]]:
        names = [
            self._manager.add_request(item.prompt, max_new_tokens=item.output, eos_token_id=-1)
            for item in items
        ]
        done: dict[str, list[int]] = {}
        while len(done) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the thread that generates has ended")
            elif result.error:
                raise RuntimeError(f"a request failed: {result.error}")
            elif result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
        return [done[name] for name in names]

    def close(self) -> None:
        self._context.__exit__(None, None, None)


def load(job: Job) -> Session:
    return Continuous(job) if job.options["mode"] == "continuous" else Generate(job)


if __name__ == "__main__":
    main(load)
