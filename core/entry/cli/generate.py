"""`octavo generate`: answers on standard output or in a file, what they took on standard error."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.entry.cli.failure import CommandFailed
from octavo.core.entry.cli.options import add_engine_options, engine_config
from octavo.core.entry.cli.prompts import Job, jobs_of
from octavo.core.entry.cli.sampling import add_sampling_options, sampling_values

if TYPE_CHECKING:
    from octavo.core.entry.inputs import Prompt
    from octavo.core.entry.llm import LLM
    from octavo.core.params import SamplingParams
    from octavo.core.types import CompletionOutput, RequestOutput

_MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    prompts = parser.add_argument_group("prompts and answers")
    prompts.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="may be given several times; without it, standard input is the prompt",
    )
    prompts.add_argument(
        "--input",
        metavar="FILE",
        help="a prompt a line (- for standard input): {prompt | prompt_token_ids | messages: …}, "
        "with an id and sampling parameters if wanted",
    )
    prompts.add_argument(
        "--batch",
        metavar="FILE",
        help="an OpenAI batch file: {custom_id, method, url, body} a line; sampling is in the bodies",
    )
    prompts.add_argument("--output", metavar="FILE", help="write answers here")
    prompts.add_argument("--json", action="store_true", help="a JSON object a line for each prompt")
    prompts.add_argument(
        "--chat", action="store_true", help="a prompt is a user's message, answered as in a chat"
    )
    prompts.add_argument("--system", metavar="TEXT", help="system message (with --chat)")
    add_sampling_options(parser)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Completes all prompts: one as it comes, several together in one engine.

    Raises:
        CommandFailed: some could not be completed.
    """
    started = time.perf_counter()
    values = sampling_values(options)
    _check(options, values)
    config = engine_config(options)
    if options.batch is not None:
        _batch(options, config)
        return
    from octavo.core.params import SamplingParams

    SamplingParams(**values)  # a mistake is told before a model is loaded
    jobs = jobs_of(options)
    values.setdefault("max_tokens", _MAX_TOKENS)
    from octavo.core.entry.llm import LLM

    with _opened(options.output) as output, LLM.from_config(config) as llm:
        prompts = [job.prompt(llm, chat=options.chat, system=options.system) for job in jobs]
        params = [llm.get_default_sampling_params(**{**values, **job.values}) for job in jobs]
        loaded = time.perf_counter() - started
        if options.json or options.output or len(prompts) > 1 or params[0].n > 1:
            _together(llm, jobs, prompts, params, output, options.json)
        else:
            _streamed(llm, prompts[0], params[0], loaded)


def _check(options: argparse.Namespace, values: dict[str, Any]) -> None:
    if options.system is not None and not options.chat:
        raise ConfigError("--system needs --chat")
    if options.batch is None:
        for name in ("logprobs", "prompt_logprobs"):
            if name in values and not options.json:
                raise ConfigError(
                    f"--{name.replace('_', '-')} needs --json, which has a place for it"
                )
        return
    for name in ("prompt", "input", "json", "chat", *values):
        if name in values or getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} does not go with --batch, whose lines say everything"
            )


@contextlib.contextmanager
def _opened(name: str | None) -> Iterator[IO[str]]:
    """The file to write to, or standard output."""
    if name is None or name == "-":
        yield sys.stdout
        return
    try:
        file = Path(name).open("w", encoding="utf-8")  # noqa: SIM115  # closed below
    except OSError as error:
        raise ConfigError(f"--output {name} cannot be written: {error}") from None
    with file:
        yield file


def _streamed(llm: LLM, prompt: Prompt, params: SamplingParams, loaded: float) -> None:
    begun = time.perf_counter()
    first = None
    tokens = 0
    for output in llm.stream(prompt, params):
        tokens += sum(len(sample.token_ids) for sample in output.outputs)
        first = first or time.perf_counter()
        for sample in output.outputs:
            if sample.finish_reason == "error":
                raise CommandFailed(f"generation failed: {sample.stop_reason}")
        sys.stdout.write("".join(sample.text for sample in output.outputs))
        sys.stdout.flush()
    ended = time.perf_counter()
    sys.stdout.write("\n")
    sys.stdout.flush()
    first = first or ended
    rate = (tokens - 1) / (ended - first) if ended > first else 0.0
    print(
        f"[{len(prompt.token_ids)} prompt tokens, {tokens} new: {rate:.1f} tokens/s after the "
        f"first, which came {first - begun:.2f} s after a start of {loaded:.2f} s]",
        file=sys.stderr,
    )


def _together(
    llm: LLM,
    jobs: list[Job],
    prompts: list[Prompt],
    params: list[SamplingParams],
    file: IO[str],
    as_json: bool,
) -> None:
    """Answers in the prompts' order, each as soon as those before it are written. What is done when
    the run is interrupted is written too."""
    begun = time.perf_counter()
    done: dict[int, RequestOutput] = {}
    written = tokens = failed = 0

    def write(index: int) -> None:
        output = done.pop(index)
        if as_json:
            print(json.dumps(record(index, jobs[index], output), ensure_ascii=False), file=file)
        else:
            for sample in output.outputs:
                print(sample.text, file=file)
        file.flush()

    try:
        for index, output in llm.as_completed(prompts, params):
            done[index] = output
            tokens += sum(len(sample.token_ids) for sample in output.outputs)
            failed += any(sample.finish_reason == "error" for sample in output.outputs)
            while written in done:
                write(written)
                written += 1
    finally:
        for index in sorted(done):
            write(index)
    spent = time.perf_counter() - begun
    print(
        f"[{len(prompts)} prompts, {tokens} new tokens in {spent:.2f} s: "
        f"{tokens / spent:.1f} tokens/s]",
        file=sys.stderr,
    )
    if failed:
        raise CommandFailed(f"{failed} of {len(prompts)} prompts could not be completed")


def record(index: int, job: Job, output: RequestOutput) -> dict[str, Any]:
    """One line of --json. Several answers to a prompt stand in `outputs`, a single one beside it."""
    samples = [_sample(sample) for sample in output.outputs]
    result: dict[str, Any] = {"index": index}
    if job.label is not None:
        result["id"] = job.label
    result |= {"prompt": output.prompt, "prompt_token_ids": output.prompt_token_ids}
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [_logprobs(at) for at in output.prompt_logprobs]
    return {**result, **samples[0]} if len(samples) == 1 else {**result, "outputs": samples}


def _sample(sample: CompletionOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.score is not None:  # of a beam
        result |= {"cumulative_logprob": sample.cumulative_logprob, "score": sample.score}
    if sample.logprobs is not None:
        result["logprobs"] = [_logprobs(at) for at in sample.logprobs]
    return result


def _logprobs(at: Any) -> Any:
    """token id -> {logprob, rank, decoded_token}; JSON has no infinity, so null stands for it."""
    if at is None:
        return None
    return {
        token: {
            "logprob": entry.logprob if entry.logprob > float("-inf") else None,
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token, entry in at.items()
    }


def _batch(options: argparse.Namespace, config: EngineConfig) -> None:
    import asyncio

    from octavo.core.entry.bar import Bar
    from octavo.core.entry.batch_file import run_batch

    path = Path(options.batch)
    if options.output and Path(options.output).resolve() == path.resolve():
        raise ConfigError("--output would overwrite --batch")
    try:
        total = _count_lines(path)
        source = path.open("rb")
    except OSError as error:
        raise ConfigError(f"--batch {path} cannot be read: {error}") from None
    begun = time.perf_counter()
    with source, _opened(options.output) as file, Bar(total, file is not sys.stdout) as bar:

        def write(line: bytes) -> None:
            file.write(line.decode())
            file.flush()

        counts = asyncio.run(run_batch(config, source, write, on_answer=bar.advance))
    spent = time.perf_counter() - begun
    print(
        f"[{counts.completed} completed, {counts.failed} failed, {counts.tokens} new tokens in "
        f"{spent:.2f} s with loading: {counts.tokens / spent:.1f} tokens/s]",
        file=sys.stderr,
    )
    if counts.failed:
        raise CommandFailed(
            f"{counts.failed} of {counts.completed + counts.failed} lines failed; "
            "the output says why"
        )


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())
