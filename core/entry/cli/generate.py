"""`octavo generate`: text on standard output, what it took on standard error."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError
from octavo.core.entry.cli.failure import CommandFailed
from octavo.core.entry.cli.options import add_engine_options, engine_config

if TYPE_CHECKING:
    from octavo.core.entry.inputs import Prompt
    from octavo.core.entry.llm import LLM
    from octavo.core.types import RequestOutput, SamplingParams

_SAMPLING: dict[str, tuple[type, str]] = {
    "temperature": (float, "0: the most likely token, always"),
    "top_p": (float, "share of probability to draw from"),
    "top_k": (int, "number of tokens to draw from; 0: all"),
    "min_p": (float, "least probability, as a share of the most likely token's"),
    "repetition_penalty": (float, "above 1: fewer repetitions"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    prompts = parser.add_argument_group("prompts and sampling")
    prompts.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="may be given several times; without it, standard input is the prompt",
    )
    prompts.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message, answered as in a chat"
    )
    prompts.add_argument("--system", metavar="TEXT", help="system message (with --chat)")
    prompts.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="most tokens to generate (256)"
    )
    for name, (kind, text) in _SAMPLING.items():
        prompts.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(), help=text
        )
    prompts.add_argument("--stop", action="append", metavar="TEXT", help="end before this text")
    prompts.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    prompts.add_argument(
        "--json", action="store_true", help="one JSON object a line for each prompt"
    )
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Completes the prompts one by one as they are given, or together with --json."""
    started = time.perf_counter()
    if options.system is not None and not options.chat:
        raise ConfigError("--system needs --chat")
    config = engine_config(options)
    texts = options.prompt or [_from_stdin()]
    from octavo.core.entry.llm import LLM

    with LLM.from_config(config) as llm:
        params = _sampling(llm, options)
        prompts = [_prompt(llm, text, options) for text in texts]
        loaded = time.perf_counter() - started
        if options.json or len(prompts) > 1:
            _together(llm, prompts, params, options.json)
        else:
            _streamed(llm, prompts[0], params, loaded)


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise ConfigError("give a prompt: --prompt TEXT, or text on standard input")
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise ConfigError("the prompt on standard input is empty")
    return text


def _sampling(llm: LLM, options: argparse.Namespace) -> SamplingParams:
    values: dict[str, Any] = {name: getattr(options, name) for name in _SAMPLING}
    values = {name: value for name, value in values.items() if value is not None}
    return llm.get_default_sampling_params(
        **values, max_tokens=options.max_tokens, stop=options.stop, ignore_eos=options.ignore_eos
    )


def _prompt(llm: LLM, text: str, options: argparse.Namespace) -> Prompt:
    if not options.chat:
        return llm.tokenize(text)
    system = [{"role": "system", "content": options.system}] if options.system else []
    return llm.render_chat([*system, {"role": "user", "content": text}])


def _streamed(llm: LLM, prompt: Prompt, params: SamplingParams, loaded: float) -> None:
    begun = time.perf_counter()
    first = None
    tokens = 0
    for output in llm.stream(prompt, params):
        tokens += sum(len(sample.token_ids) for sample in output.outputs)
        first = first or time.perf_counter()
        _check(output)
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


def _together(llm: LLM, prompts: list[Prompt], params: SamplingParams, as_json: bool) -> None:
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params)
    spent = time.perf_counter() - begun
    for output in outputs:
        _check(output)
        print(
            json.dumps(_record(output), ensure_ascii=False) if as_json else output.outputs[0].text
        )
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(
        f"[{len(prompts)} prompts, {tokens} new tokens in {spent:.2f} s: "
        f"{tokens / spent:.1f} tokens/s]",
        file=sys.stderr,
    )


def _check(output: RequestOutput) -> None:
    for sample in output.outputs:
        if sample.finish_reason == "error":
            raise CommandFailed(f"generation failed: {sample.stop_reason}")


def _record(output: RequestOutput) -> dict[str, Any]:
    sample = output.outputs[0]
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
