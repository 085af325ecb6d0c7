"""Reasoning: what a model thinks before it answers, told apart from the answer.

Whether it thinks is decided by the prompt and by what it writes, never by what is missing: an answer
without tags is an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.core.entry.tools.grammar import literal

if TYPE_CHECKING:
    from octavo.core.loading.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A piece of what stands outside the reasoning."""

    text: str


class ReasoningParser:
    """Tells reasoning between two tags from the answer behind it, in one sample's text.

    A subclass sets the tags. White space next to them is left out.

    Args:
        opened: the prompt ends inside the reasoning.
    """

    start: ClassVar[str] = "<think>"  # the text that opens reasoning
    stop: ClassVar[str] = "</think>"  # the text behind which the answer begins
    switches: ClassVar[tuple[str, ...]] = ("enable_thinking", "thinking")
    """Names in chat_template_kwargs that switch thinking off when they are false."""

    def __init__(self, opened: bool) -> None:
        self._state = "thought" if opened else "begin"
        self._held = ""
        self._fresh = True  # nothing of the present part was given yet

    @classmethod
    def fits(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        """Whether a model with this chat template and these tokens reasons in this form."""
        return cls.stop in template or has_token(cls.stop)

    @classmethod
    def mode(cls, prompt: str, variables: Mapping[str, Any], continued: str | None) -> bool | None:
        """How an answer to this prompt begins: True inside the reasoning, False in front of what may
        be reasoning, None where there is none.

        Args:
            prompt: the rendered conversation. variables: the request's chat_template_kwargs.
            continued: the text of the message that is continued.
        """
        if any(variables.get(name) is False for name in cls.switches):
            return None
        if continued is not None:
            if cls.start not in continued:
                return None if continued.strip() else False
            return True if continued.rfind(cls.stop) < continued.rfind(cls.start) else None
        tail = prompt.rstrip()
        if tail.endswith(cls.start):
            return True
        return None if tail.endswith(cls.stop) else False

    @classmethod
    def preamble(cls, opened: bool, special: Mapping[str, int]) -> str:
        """Rules in Lark of which `preamble` is the reasoning in front of an answer, if there is any."""
        stop = literal(cls.stop, special)
        lazy = "" if cls.stop in special else "[lazy]"
        rules = [f"thought{lazy}: ANYTHING {stop}", "ANYTHING: /(.|\\n)*/", "GAP: /[ \\n]{0,4}/"]
        if opened:
            return "\n".join(["preamble: thought GAP", *rules, ""])
        start = literal(cls.start, special)
        return "\n".join([f"preamble: (GAP {start} thought GAP)?", *rules, ""])

    def push(self, text: str) -> Sequence[Thought | Answer]:
        """What is certain after this further text."""
        self._held += text
        pieces: list[Thought | Answer] = []
        if self._state == "begin":
            self._begin(pieces)
        if self._state == "thought":
            self._think(pieces)
        if self._state == "gap":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "answer"
        if self._state == "answer" and self._held:
            pieces.append(Answer(self._held))
            self._held = ""
        return pieces

    def finish(self) -> Sequence[Thought | Answer]:
        """What was held back."""
        held, self._held = self._held, ""
        if self._state == "thought":
            held = held.lstrip() if self._fresh else held
            return [Thought(held.rstrip())] if held.strip() else []
        return [Answer(held)] if held and self._state != "gap" else []

    @property
    def thinking(self) -> bool:
        """Inside the reasoning."""
        return self._state == "thought"

    @property
    def undecided(self) -> bool:
        """Nothing was read yet that says whether there is reasoning."""
        return self._state == "begin"

    def _begin(self, pieces: list[Thought | Answer]) -> None:
        visible = self._held.lstrip()
        if visible.startswith(self.start):
            self._state, self._held = "thought", visible[len(self.start) :]
        elif not self.start.startswith(visible):
            self._state = "answer"

    def _think(self, pieces: list[Thought | Answer]) -> None:
        if self._fresh:
            self._held = self._held.lstrip()
        thought, found, rest = self._held.partition(self.stop)
        if found:
            if thought.strip():
                pieces.append(Thought(thought.rstrip()))
            self._state, self._held = "gap", rest
            return
        # White space may stand in front of the tag, and the text's end may begin it.
        kept = len(thought)
        for size in range(min(len(self.stop) - 1, len(thought)), 0, -1):
            if self.stop.startswith(thought[-size:]):
                kept -= size
                break
        kept = len(thought[:kept].rstrip())
        if kept:
            pieces.append(Thought(thought[:kept]))
            self._held, self._fresh = thought[kept:], False


class Qwen3Reasoning(ReasoningParser):
    """`<think>…</think>`; the template's `enable_thinking` switches it off."""


class DeepSeekReasoning(ReasoningParser):
    """The same tags, as DeepSeek's models write them."""

    @classmethod
    def fits(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        """The tags, in a vocabulary of DeepSeek's."""
        return super().fits(template, has_token) and (
            "<｜Assistant｜>" in template or has_token("<｜Assistant｜>")
        )


class TokenCounter:
    """Counts the tokens of one sample's reasoning, its tags included."""

    def __init__(self, parser: ReasoningParser, tokenizer: Tokenizer) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._waiting = 0
        self.count = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes further tokens of the sample."""
        parser = self._parser
        for token in token_ids:
            was_undecided = parser.undecided
            if not (was_undecided or parser.thinking):
                return
            thinking = parser.thinking
            # Tags are ASCII: what half a character becomes is of no matter.
            parser.push(self._tokenizer.token_bytes(token).decode("utf-8", "replace"))
            self._waiting += was_undecided
            if thinking:
                self.count += 1
            elif was_undecided and parser.thinking:
                self.count += self._waiting
