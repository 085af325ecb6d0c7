"""What `octavo generate` is asked to complete: arguments, text, or lines of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError, nearest

if TYPE_CHECKING:
    from octavo.core.entry.inputs import Prompt
    from octavo.core.entry.llm import LLM

_FORMS = ("prompt", "prompt_token_ids", "messages")
_ENGINES_OWN = {"output_kind", "detokenize"}


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt. content: text, token ids or messages; values: its own sampling parameters; where:
    how a mistake in it is located; label: given back with the answer."""

    content: Any
    form: str = "prompt"
    values: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    label: Any = None

    def prompt(self, llm: LLM, *, chat: bool, system: str | None) -> Prompt:
        """The prompt in tokens.

        Raises:
            ConfigError: it cannot be used; says where it stands.
        """
        from octavo.core.params import ParamError

        try:
            if self.form == "prompt_token_ids":
                return llm.tokenize({"prompt_token_ids": self.content})
            if self.form == "messages":
                return llm.render_chat(self.content)
            if not chat:
                return llm.tokenize(self.content)
            first = [{"role": "system", "content": system}] if system else []
            return llm.render_chat([*first, {"role": "user", "content": self.content}])
        except ParamError as error:
            raise ConfigError(f"{self.where}{error}") from None


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """All prompts that the command line names.

    Raises:
        ConfigError: there are none, or one cannot be read.
    """
    if options.input is not None and options.prompt:
        raise ConfigError("give --prompt or --input, not both")
    if options.input is not None:
        jobs = list(_lines(options.input))
        if not jobs:
            raise ConfigError(f"--input {options.input} holds no prompts")
        return jobs
    return [Job(text) for text in options.prompt] or [Job(_from_stdin())]


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise ConfigError("give a prompt: --prompt TEXT, or text on standard input")
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise ConfigError("the prompt on standard input is empty")
    return text


def _lines(name: str) -> Iterator[Job]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input {name} cannot be read: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _job(line, f"{'standard input' if name == '-' else name}, line {number}: ")


def _job(line: str, where: str) -> Job:
    from octavo.core.params import ParamError, SamplingParams

    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}not valid JSON: {error}") from None
    forms = [form for form in _FORMS if isinstance(value, dict) and form in value]
    if len(forms) != 1:
        raise ConfigError(f"{where}a line is an object with one of {', '.join(_FORMS)}")
    content, label = value.pop(forms[0]), value.pop("id", None)
    _check_content(forms[0], content, where)
    known = set(SamplingParams.__struct_fields__) - _ENGINES_OWN
    for name in value:
        if name not in known:
            raise ConfigError(f"{where}unknown field {name!r}{nearest(name, [*known, *_FORMS])}")
    if bias := value.get("logit_bias"):
        try:
            value["logit_bias"] = {int(token): number for token, number in bias.items()}
        except (AttributeError, ValueError):
            raise ConfigError(f"{where}logit_bias maps token ids to numbers") from None
    try:
        SamplingParams(**value)
    except (ParamError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}{error}") from None
    return Job(content, forms[0], value, where, label)


def _check_content(form: str, content: Any, where: str) -> None:
    if form == "prompt" and not isinstance(content, str):
        raise ConfigError(f"{where}prompt must be text, got {content!r:.80}")
    if form == "messages" and not (
        isinstance(content, list) and content and all(isinstance(m, dict) for m in content)
    ):
        raise ConfigError(f"{where}messages must be a list of objects, got {content!r:.80}")
