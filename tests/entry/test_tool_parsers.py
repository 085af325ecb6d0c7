"""The parsers of calls: whatever the pieces, the same events; and grammars that lead to such calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.config import ConfigError
from octavo.core.entry.formats import check_names, choose_formats
from octavo.core.entry.reasoning import DeepSeekReasoning, ReasoningParser
from octavo.core.entry.tools.base import Arguments, CallBegin, CallEnd, CallForm, Text, Tool
from octavo.core.entry.tools.deepseek import DeepSeekParser
from octavo.core.entry.tools.grammar import calls_grammar, literal
from octavo.core.entry.tools.hermes import HermesParser
from octavo.core.entry.tools.llama3 import Llama3Parser
from octavo.core.entry.tools.mistral import MistralParser
from octavo.core.entry.tools.pythonic import PythonicParser
from octavo.core.loading import chat
from octavo.core.params import StructuredOutputsParams
from octavo.core.structured import grammar_text, make_tokenizer

TOOLS = [Tool("f", {}), Tool("g", {}), Tool("get_weather", {})]
NESTED = (
    '{"wd":23,"sd":0.8,"injection":"ZSJB39","note":"a}\\"{é\\u00e9","n":{"x":[1,-2.5e3,null,{}]}}'
)
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n%s\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def read(kind: Any, text: str, sizes: list[int] | None = None, cut: bool = False) -> list[Any]:
    """The events, pieces of one kind joined."""
    parser = kind(TOOLS)
    events: list[Any] = []
    at = 0
    for size in sizes or []:
        events += parser.push(text[at : at + size])
        at += size
    events += [*parser.push(text[at:]), *parser.finish(cut)]
    joined: list[Any] = []
    for event in events:
        if joined and type(joined[-1]) is type(event) and isinstance(event, (Text, Arguments)):
            joined[-1] = type(event)(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


def calls(*pairs: tuple[str, str]) -> list[Any]:
    return [e for name, text in pairs for e in (CallBegin(name), Arguments(text), CallEnd())]


WHOLE: list[tuple[Any, str, list[Any]]] = [
    (HermesParser, 'Sure.\n<tool_call>\n{"name": "f", "arguments": NESTED}\n</tool_call>\n<tool_call>{"name":"g","arguments":{}}</tool_call>\n'.replace('NESTED', NESTED), [Text("Sure.\n"), *calls(("f", NESTED), ("g", "{}"))]),
    (HermesParser, '<tool_call>{"arguments": {"a":1}, "name": "g"}</tool_call> hi', [*calls(("g", '{"a":1}')), Text(" hi")]),
    (HermesParser, '<tool_call><tool_call>{"name": "f"}</tool_call>', [Text("<tool_call>"), *calls(("f", "{}"))]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', calls(("f", '{"a": 1}'))),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', calls(("f", '{"a": "x\\ny"}'))),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', calls(("f", '{"a": 1}'))),
    (Llama3Parser, '{"name": "f", "parameters": NESTED}; {"name": "g", "parameters": {}}'.replace('NESTED', NESTED), calls(("f", NESTED), ("g", "{}"))),
    (Llama3Parser, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', calls(("f", '{"a": 1}'))),
    (MistralParser, '[TOOL_CALLS] [{"name": "f", "arguments": NESTED}, {"name": "g", "arguments": {}}]'.replace('NESTED', NESTED), calls(("f", NESTED), ("g", "{}"))),
    (MistralParser, 'ok[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather{"b": 2}', [Text("ok"), *calls(("f", '{"a": 1}'), ("get_weather", '{"b": 2}'))]),
    (MistralParser, "[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}", calls(("g", "{}"))),
    (DeepSeekParser, "ok" + V3 % NESTED, [Text("ok"), *calls(("f", NESTED), ("g", "{}"))]),
    (DeepSeekParser, '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', calls(("f", '{"a": 1}'))),
    (PythonicParser, '[f(a="x\\n\\"é", b=[1, 2.0, {"k": None}], c=True), g()]', calls(("f", '{"a": "x\\n\\"é", "b": [1, 2.0, {"k": null}], "c": true}'), ("g", "{}"))),
    (PythonicParser, "[get_weather(city='O\\'Hare', d=0x1f, e=(1,2), t='''a'b''', u='\\u00e9')]", calls(("get_weather", '{"city": "O\'Hare", "d": 31, "e": [1, 2], "t": "a\'b", "u": "é"}'))),
    (PythonicParser, "<|python_start|>[f(a=1.5)]<|python_end|>", calls(("f", '{"a": 1.5}'))),
]  # fmt: skip
NO_CALLS: list[tuple[Any, str]] = [
    (HermesParser, "a <b> <tool_call>nope</tool_call> x"),
    (HermesParser, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    (HermesParser, "<tool_"),
    (HermesParser, " \n"),
    (Llama3Parser, '{"answer": {"name": "f", "parameters": {}}}'),
    (Llama3Parser, "<|python_tag|>print(1)"),
    (Llama3Parser, 'as {"name": "f", "parameters": {}}'),
    (MistralParser, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MistralParser, "[TOOL_CALLS] soon"),
    (DeepSeekParser, "<｜tool▁calls▁begin｜>hm"),
    (DeepSeekParser, "<｜tool▁calls▁end｜>"),
    (PythonicParser, "[1] is a reference"),
    (PythonicParser, "[unknown(a=1)]"),
]
EVERY = [(kind, text) for kind, text, _ in WHOLE] + NO_CALLS


@pytest.mark.parametrize(("kind", "text", "expected"), WHOLE)
def test_calls(kind: Any, text: str, expected: list[Any]) -> None:
    assert read(kind, text) == expected
    for event in expected:
        if isinstance(event, Arguments):
            assert isinstance(json.loads(event.text), dict)


@pytest.mark.parametrize(("kind", "text"), NO_CALLS)
def test_no_calls(kind: Any, text: str) -> None:
    assert read(kind, text) == [Text(text)]


@pytest.mark.parametrize(("kind", "text"), EVERY)
def test_pieces_change_nothing_at_any_end(kind: Any, text: str) -> None:
    for end in range(len(text) + 1):
        for cut in (False, True):
            whole = read(kind, text[:end], cut=cut)
            assert read(kind, text[:end], [1] * end, cut) == whole


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_text_in_any_pieces(data: st.DataObject) -> None:
    kind, text = data.draw(st.sampled_from(EVERY))
    other = data.draw(st.sampled_from([t for k, t in EVERY if k is kind]))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    mixed = text[:start] + data.draw(st.text("<{[}]>\"' \\a", max_size=4)) + text[end:] + other
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=60))
    assert read(kind, mixed, sizes) == read(kind, mixed)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
VALUES = st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), JSON, max_size=4)


@settings(max_examples=100, deadline=None)
@given(VALUES, st.booleans())
def test_arguments_come_through_as_they_were_written(values: Any, ascii_only: bool) -> None:
    text = json.dumps(values, ensure_ascii=ascii_only)
    expected = calls(("f", text))
    assert (
        read(HermesParser, f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>')
        == expected
    )
    assert read(DeepSeekParser, (V3 % text).replace("function<｜tool▁sep｜>g", "x"))[:3] == expected
    written = ", ".join(f"{key}={value!r}" for key, value in values.items())
    found = read(PythonicParser, f"[f({written})]", [1] * 400)
    assert json.loads(found[1].text) == values and found[2] == CallEnd()


def test_text_is_held_back_only_while_it_may_become_a_call() -> None:
    def given_after_each(kind: Any, text: str) -> list[str]:
        parser = kind(TOOLS)
        return ["".join(e.text for e in parser.push(c) if isinstance(e, Text)) for c in text]

    assert given_after_each(HermesParser, "a<to<x") == ["a", "", "", "", "<to", "<x"]
    assert given_after_each(Llama3Parser, '{"ax') == ["", "", "", '{"ax']
    assert given_after_each(PythonicParser, "[gex")[2:] == ["", "[gex"]
    assert given_after_each(MistralParser, "[TOOL_CALLS]fx")[-1] == "[TOOL_CALLS]fx"


def test_broken_arguments_are_told_of() -> None:
    found = read(HermesParser, '<tool_call>{"name": "f", "arguments": {"a": x}}')
    raw = '<tool_call>{"name": "f", "arguments": {"a": '
    assert found == [CallBegin("f"), Arguments('{"a": '), CallEnd(True, raw, ""), Text("x}}")]


# ------------------------------------------------------------------------------------------- grammars

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
}
STRICT = [Tool("f", SCHEMA, True), Tool("get_weather", {})]
SPECIAL = {"</s>": 256, "[TOOL_CALLS]": 257, "</think>": 258}
FORMS: list[tuple[Any, CallForm]] = [
    (HermesParser, HermesParser.form("")),
    (Llama3Parser, Llama3Parser.form("")),
    (MistralParser, MistralParser.form("")),
    (MistralParser, MistralParser.form("[ARGS]")),
    (DeepSeekParser, DeepSeekParser.form("```json")),
    (DeepSeekParser, DeepSeekParser.form("")),
    (PythonicParser, PythonicParser.form("")),
]


def follows(grammar: str, text: str, special: dict[str, int] = SPECIAL) -> bool | None:
    """Whether the text follows the grammar to its end; None: it does so far. special: the texts that
    are written as one token."""
    from llguidance import LLMatcher

    tokens = [bytes([i]) for i in range(256)] + [name.encode() for name in SPECIAL]
    tokenizer = make_tokenizer(tokens, list(SPECIAL.values()), [256], lambda t: list(t.encode()))
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    while text:
        name = next((n for n in special if text.startswith(n)), None)
        ids += [special[name]] if name else list(text[0].encode())
        text = text[len(name) if name else 1 :]
    if matcher.try_consume_tokens(ids) < len(ids):
        return False
    return True if matcher.is_accepting() else None


def written(form: CallForm, *called: tuple[str, str]) -> str:
    each = [form.head.replace("NAME", name) + text + form.tail for name, text in called]
    return form.before + form.between.join(each) + form.after


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_an_enforced_call_is_read_as_one(kind: Any, form: CallForm) -> None:
    one, other = ('city="R", n=3', "") if form.python else ('{"city": "R", "n": 3}', "{}")
    bad = "n=3" if form.python else '{"n": 3}'
    grammar = calls_grammar(form, STRICT, special=SPECIAL, many=True)
    single = calls_grammar(form, STRICT, special=SPECIAL, many=False)
    first, both = written(form, ("f", one)), written(form, ("f", one), ("get_weather", other))
    assert (follows(grammar, first), follows(single, first)) == (True, True)
    assert (follows(grammar, both), follows(single, both)) == (True, False)
    assert follows(grammar, written(form, ("f", bad))) is False
    assert follows(grammar, written(form, ("unknown", other))) is False
    assert follows(grammar, "Sure.") is False
    assert read(kind, both) == calls(("f", '{"city": "R", "n": 3}'), ("get_weather", "{}"))


@pytest.mark.parametrize(("kind", "form"), [pair for pair in FORMS if pair[1].trigger])
def test_a_call_in_running_text(kind: Any, form: CallForm) -> None:
    grammar = calls_grammar(form, STRICT, special=SPECIAL, many=True, lazy=True)
    call = written(form, ("f", '{"city": "R"}'))
    any_arguments = written(form, ("get_weather", '{"x": [1]}'))
    for text in ("", "Just <text> [1].", f"Sure. {call}", f"{call}\nand {any_arguments} so."):
        assert follows(grammar, text) is True, text
    assert follows(grammar, "Sure. " + written(form, ("f", '{"n": 3}'))) is False
    assert follows(grammar, "Sure. " + written(form, ("unknown", "{}"))) is False
    once = calls_grammar(form, STRICT, special=SPECIAL, many=False, lazy=True)
    assert follows(once, f"a {call}") is True and follows(once, f"{call}\n{call}") is not True


def test_text_in_lark() -> None:
    assert literal('a"b</s>c', SPECIAL) == '"a\\"b" <[256]> "c"'
    odd = Tool("f", {"properties": {"a": {"const": "::= \\"}}, "required": ["a"]})
    grammar = calls_grammar(HermesParser.form(""), [odd], special={}, many=False)
    ready = grammar_text(StructuredOutputsParams(grammar=grammar))
    text = written(HermesParser.form(""), ("f", '{"a": "::= \\\\"}'))
    assert follows(ready, text) is True


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_a_grammar_behind_reasoning(kind: str) -> None:
    values: Any = {
        "json": {"const": "x"}, "regex": '"x"', "choice": ['"x"', "y"], "grammar": 'start: "\\"x\\""',
    }  # fmt: skip
    params: Any = {kind: values[kind]}
    # The tag is a token of its own in one vocabulary, and spelled out in the other.
    for special in ({}, SPECIAL):
        opened = StructuredOutputsParams(
            **params, preamble=ReasoningParser.preamble(True, special), alternative='start: "call"'
        )
        grammar = grammar_text(opened)
        for text in ('hm "y"</think>\n\n"x"', "hm</think>call"):
            assert follows(grammar, text, special) is True
        assert follows(grammar, "hm</think>z", special) is False
        assert follows(grammar, '"x"', special) is None
        free = StructuredOutputsParams(**params, preamble=ReasoningParser.preamble(False, special))
        assert follows(grammar_text(free), '"x"') is True
        assert follows(grammar_text(free), "z") is False


# --------------------------------------------------------------------------------------- what is chosen


class _Tokenizer:
    """A vocabulary of a few special tokens, and a template."""

    special_ids = frozenset({0})

    def __init__(self, template: str, token: str = "</s>") -> None:
        self.template, self.token = template, token

    def template_for(self, asked: Any, tools: Any) -> str:
        return self.template

    def token_to_id(self, token: str) -> int | None:
        return 0 if token == self.token else None

    def id_to_token(self, index: int) -> str:
        return self.token


@pytest.mark.parametrize(
    ("template", "token", "expected"),
    [
        ("{{ tools }}<tool_call>", "</s>", HermesParser),
        ("{{ tools }}<tool_call><function=x>", "</s>", None),
        ("{{ tools }}", "[TOOL_CALLS]", MistralParser),
        ('{{ tools }}{"name": , "parameters": x}', "<|python_tag|>", Llama3Parser),
        ("{{ tools }}[func_name1(a=1)]", "</s>", PythonicParser),
        ("{{ tools }}", "<｜tool▁call▁begin｜>", DeepSeekParser),
        ("{{ messages }}", "</s>", None),
    ],
)
def test_the_model_says_which_parser(template: str, token: str, expected: Any) -> None:
    tokenizer: Any = _Tokenizer(template, token)
    found = choose_formats(tokenizer, "auto", "auto", False)
    assert found.tools is expected and found.takes_tools == ("tools" in template)
    assert choose_formats(tokenizer, "none", "none", False).tools is None
    assert choose_formats(tokenizer, "qwen", "none", False).tools is HermesParser


def test_reasoning_and_its_tags() -> None:
    deepseek: Any = _Tokenizer("</think>", "<｜Assistant｜>")
    assert choose_formats(deepseek, "auto", "auto", False).reasoning is DeepSeekReasoning
    plain: Any = _Tokenizer("{{ messages }}")
    assert choose_formats(plain, "auto", "auto", False).reasoning is None


def test_what_contradicts_is_refused() -> None:
    tokenizer: Any = _Tokenizer("{{ messages }}")
    assert choose_formats(tokenizer, "auto", "auto", True).tools is HermesParser
    with pytest.raises(ConfigError, match="form of hermes"):
        choose_formats(tokenizer, "mistral", "auto", True)
    with pytest.raises(ConfigError, match="did you mean 'mistral'"):
        check_names("mistrl", "auto")
    with pytest.raises(ConfigError, match="deepseek_r1"):
        check_names("auto", "r1")


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("{{ c.function.arguments | tojson }}", '{"é": 1}'),
        ("{{ c.function.arguments }}", '{"é":1}'),
        ("{{ 'x' + c['function']['arguments'] }}", 'x{"é":1}'),
        ("{% set a = c.function.arguments %}{{ a }}", '{"é":1}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}", "é1"),
    ],
)
def test_arguments_in_the_shape_the_template_reads(printed: str, expected: str) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
        + printed
        + "{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"é":1}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert chat.render(template, messages, add_generation_prompt=False) == expected
    assert call["function"] == {
        "name": "f",
        "arguments": '{"é":1}',
    }  # the caller's own is untouched
    none = "{{ 'nothing' if messages[0].content is none else 'text' }}"
    assert chat.render(none, messages, add_generation_prompt=False) == "nothing"
