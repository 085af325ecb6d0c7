"""`<｜tool▁call▁begin｜>…<｜tool▁sep｜>…<｜tool▁call▁end｜>`: DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.entry.tools.base import CallForm, Reading
from octavo.core.entry.tools.json_text import JsonCalls

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"
_FENCE = "```"


class DeepSeekParser(JsonCalls):
    """V3 and R1 write `function<sep>name` and the arguments in a fence of code, V3.1 `name<sep>{…}`."""

    markers = (ALL, ALL_END, ONE, ONE_END, SEP)
    openings = (ALL, ONE)
    blank_openings = (ALL_END,)

    @classmethod
    def fits(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        """The markers stand in its templates, or are tokens."""
        return ONE in template or has_token(ONE)

    @classmethod
    def form(cls, template: str) -> CallForm:
        """With a fence where the template shows one."""
        if f"{_FENCE}json" in template:
            return CallForm(
                before=ALL,
                head=f"{ONE}function{SEP}NAME\n{_FENCE}json\n",
                tail=f"\n{_FENCE}{ONE_END}",
                between="\n",
                after=ALL_END,
                trigger=ALL,
            )
        return CallForm(
            before=ALL, head=f"{ONE}NAME{SEP}", tail=ONE_END, after=ALL_END, trigger=ALL
        )

    def read(self, opening: str) -> Reading[None]:
        """One call, and the marker in front of the first; or the marker behind the last."""
        if opening == ALL_END:
            if not self._any:
                raise self.fail()
            self._settle()
            return
        if opening == ALL:
            character = yield from self.visible()
            self.unget(character)
            yield from self.expect(ONE)
        kinds = {"function", *self.names}
        name, character = yield from self.word((yield from self.get()), kinds)
        self.unget(character)
        yield from self.expect(SEP)
        fenced = name == "function"
        if fenced:
            name, character = yield from self.word((yield from self.get()), self.names)
            self.unget(character)
            yield from self.expect(f"\n{_FENCE}json\n")
        if name not in self.names:
            raise self.fail()
        character = yield from self.visible()
        if character != "{":
            raise self.fail(character)
        self.begin(name)
        yield from self.scan(character, self.arguments)
        self.end()
        if fenced:
            yield from self.closing(_FENCE)
        yield from self.closing(ONE_END)
