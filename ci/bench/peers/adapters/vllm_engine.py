"""vLLM's CPU build, by its offline API. options: model, and arguments of `vllm.LLM`."""

from __future__ import annotations

from peers.adapters.child import main
from peers.job import Item, Job


class Vllm:
    def __init__(self, job: Job) -> None:
        from vllm import LLM

        self._llm = LLM(model=job.options["model"], **job.options["arguments"])

    def run(self, items: list[Item]) -> list[list[int]]:
        from vllm import SamplingParams

        done = self._llm.generate(
            [{"prompt_token_ids": item.prompt} for item in items],
            [
                SamplingParams(temperature=0.0, max_tokens=item.output, ignore_eos=True)
                for item in items
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in done]

    def close(self) -> None:
        del self._llm


if __name__ == "__main__":
    main(Vllm)
