"""Parsers that plug-ins bring: found by their hooks, chosen by name or by the template, and used."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from octavo.core.config import ConfigError
from octavo.core.entry.formats import check_names, choose_formats
from octavo.core.entry.tools.base import Arguments, CallBegin, CallEnd, Text, Tool
from octavo.core.loading.tokenizer import Tokenizer
from octavo.plugins import manager

DOCS = Path(__file__).parents[2] / "docs" / "plugins" / "parsers.md"
MORE = """

class MoonReasoning(ReasoningParser):
    start, stop = "(moon", "moon)"


@hookimpl
def octavo_reasoning_parsers():
    return {"moon": "octavo_at:MoonReasoning", "gone": "octavo_at:Gone", "odd": "octavo_at:AtParser"}
"""


def tokenizer(template: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE({}, [])), chat_template=template)


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plug-in that the documentation shows, with reasoning of its own."""
    [code] = [
        c for c in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S) if "AtParser" in c
    ]
    code = code.replace("CallForm, hookimpl", "CallForm, ReasoningParser, hookimpl")
    (tmp_path / "octavo_at.py").write_text(code + MORE)
    monkeypatch.syspath_prepend(tmp_path)
    found = manager.Plugins([metadata.EntryPoint("at", "octavo_at", "octavo")])
    assert not found.problems and not found.warnings
    monkeypatch.setattr(manager, "plugins", lambda: found)
    yield
    sys.modules.pop("octavo_at", None)


def test_the_documented_parser_reads_calls() -> None:
    formats = choose_formats(tokenizer("{{ tools }} write @name {}@"), "auto", "moon", False)
    assert formats.tools is not None and formats.tools.__name__ == "AtParser"
    parser = formats.tools([Tool("f", {})])
    events = [e for c in 'hi @f {"a": 1}@ me@x.org' for e in parser.push(c)]
    events += parser.finish()
    text = "".join(e.text for e in events if isinstance(e, Text))
    assert text == "hi  me@x.org"
    assert CallBegin("f") in events and CallEnd() in events
    assert "".join(e.text for e in events if isinstance(e, Arguments)) == '{"a": 1}'


def test_reasoning_by_other_tags() -> None:
    formats = choose_formats(tokenizer("x"), "none", "moon", False)
    assert formats.reasoning is not None and formats.tools is None
    parser = formats.reasoning(False)
    pieces = [*parser.push("(moon hm mo"), *parser.push("on) yes"), *parser.finish()]
    assert [piece.text for piece in pieces] == ["hm", "yes"]


def test_a_parser_that_cannot_be_used() -> None:
    check_names("at", "moon")
    with pytest.raises(ConfigError, match="cannot be imported"):
        choose_formats(tokenizer("x"), "none", "gone", False)
    with pytest.raises(ConfigError, match="is no ReasoningParser"):
        choose_formats(tokenizer("x"), "none", "odd", False)
