"""Writes docs/plugins/contract.md, every hook, class, method and field of the contract, from the code.

`python ci/make_contract.py` writes it; with `--check` it only says whether the page is current. Either
way it fails where something public has no documentation, and where something was taken out of the
contract that the release before did not deprecate: ci/contract.json is the record of what there was.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from octavo import plugins
from octavo.core import contract
from octavo.plugins import deprecation, hookspecs

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "plugins" / "contract.md"
RECORD = ROOT / "ci" / "contract.json"
OPAQUE = ("Handle", "Inputs", "PackedWeight")
MARKERS = ("hookimpl", "hookspec")
FIRST = ("Backend", "Ops", "Probe", "Capabilities", "ModelShape", "Limits", "ExecutionPlan", "Lane")


def doc(thing: object) -> str:
    return inspect.cleandoc(inspect.getdoc(thing) or "")


def own_doc(cls: type) -> str:
    """A class's own docstring; dataclasses write one of their own where there is none."""
    text = cls.__dict__.get("__doc__") or ""
    return "" if text.startswith(f"{cls.__name__}(") else inspect.cleandoc(text)


def field_docs(cls: type) -> dict[str, str]:
    """What the source says of each annotated name of a class: the text below it, the comment beside or
    above it, or its words in the class's docstring."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines, body = source.splitlines(), ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    text = own_doc(cls)
    found = {}
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name, said = node.target.id, ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            said = inspect.cleandoc(str(after.value.value))
        beside = [ln.partition("  # ")[2] for ln in lines[node.lineno - 1 : node.end_lineno]]
        above, at = [], node.lineno - 2
        while at > 0 and lines[at].strip().startswith("# "):
            above.insert(0, lines[at].strip().removeprefix("# "))
            at -= 1
        said = said or " ".join(filter(None, beside)) or " ".join(above)
        found[name] = said or in_words(name, text)
    return found


def in_words(name: str, text: str) -> str:
    """What a docstring says of a field, as `name: …` or `name, other: …`, or in backticks in a sentence."""
    flat = " ".join(text.split())
    listed = re.search(rf"(?:^|[.;] )(?:`?\w+`?, )*`?{name}`?(?:, `?\w+`?)*: ([^.;]*)", flat)
    if listed:
        return listed.group(1)
    sentence = re.search(rf"[^.]*`{name}`[^.]*", flat)
    return sentence.group(0).strip() if sentence else ""


def members(cls: type) -> dict[str, Any]:
    """The public methods and properties that a class defines."""
    found = {}
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if not name.startswith("_") and (
            inspect.isfunction(function) or isinstance(function, property)
        ):
            found[name] = function
    return found


def classes() -> list[type]:
    """All of `octavo.plugins`, what is looked up most first."""
    names = [n for n in plugins.__all__ if n not in (*OPAQUE, *MARKERS, "API_VERSION")]
    return [getattr(plugins, n) for n in sorted(names, key=lambda n: (n not in FIRST, _rank(n), n))]


def _rank(name: str) -> int:
    return FIRST.index(name) if name in FIRST else 0


def hooks() -> dict[str, Any]:
    return {n: f for n, f in vars(hookspecs).items() if n.startswith("octavo_")}


def surface() -> list[str]:
    """Every name that a plug-in may use."""
    names = [*hooks(), *plugins.__all__]
    for cls in classes():
        names += [f"{cls.__name__}.{n}" for n in (*field_docs(cls), *members(cls))]
    return sorted(set(names))


def undocumented() -> list[str]:
    """Public names that nothing is said of."""
    bare = [name for name, hook in hooks().items() if not doc(hook)]
    for cls in classes():
        bare += [] if own_doc(cls) else [cls.__name__]
        bare += [f"{cls.__name__}.{n}" for n, text in field_docs(cls).items() if not text]
        bare += [f"{cls.__name__}.{n}" for n, m in members(cls).items() if not doc(m)]
    return bare


def removed_too_soon(record: dict[str, Any]) -> list[str]:
    """Names of the record that are gone though no earlier minor release deprecated them."""
    was = {name: tuple(since) for name, since in record["deprecated"].items()}
    gone = set(record["names"]) - set(surface())
    return sorted(n for n in gone if n not in was or was[n] >= contract.API_VERSION)


def cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def signature(name: str, function: Any) -> str:
    text = str(inspect.signature(function)).replace("'", "")
    return name + re.sub(r"(?:octavo|torch)\.[\w.]*\.(\w+)", r"\1", text)


def described(cls: type) -> str:
    parts = [f"## {cls.__name__}", own_doc(cls)]
    said = field_docs(cls)
    rows = ["| field | type | default | |", "|---|---|---|---|"]
    annotations = inspect.get_annotations(cls)
    for name, text in said.items():
        kind = re.sub(r"^(ClassVar|Mapped)\[(.*)\]$", r"\2", str(annotations[name]))
        rows.append(f"| `{name}` | `{cell(kind)}` | {default(cls, name)} | {cell(text)} |")
    if said:
        parts.append("\n".join(rows))
    entries = []
    for name, member in members(cls).items():
        head = name if isinstance(member, property) else signature(name, member)
        entries.append(f"- `{head}`  \n  {cell(doc(member))}")
    if entries:
        parts.append("\n".join(entries))
    return "\n\n".join(parts)


def default(cls: type, name: str) -> str:
    if dataclasses.is_dataclass(cls):
        field = cls.__dataclass_fields__[name]
        if field.default_factory is not dataclasses.MISSING:
            return "empty"
        value = field.default
        return "" if value is dataclasses.MISSING else f"`{cell(repr(value))}`"
    return f"`{cell(repr(vars(cls)[name]))}`" if name in vars(cls) else ""


def page() -> str:
    major, minor = contract.API_VERSION
    going = {each.name: str(each) for each in deprecation.DEPRECATED}
    parts = [
        "# The contract",
        "Made from the code by `python ci/make_contract.py`; a test says when it is not current, and when a "
        "hook, method or field has no documentation.",
        f"Version {major}.{minor}. Everything is imported from `octavo.plugins`; [changes.md](changes.md) "
        "says what each version brought and how something goes.",
        "## Hooks",
        "\n".join(f"- `{signature(n, f)}`  \n  {cell(doc(f))}" for n, f in hooks().items()),
        "## What the core never looks into",
        "- `Handle`: a layer's KV cache as its backend keeps it\n"
        "- `Inputs`: what `Backend.prepare` made of a batch; the ops' `meta`. It has `token_ids` [T] and "
        "`logits_rows` [L]\n"
        "- `PackedWeight`: a weight in the layout that `Ops.pack_weight` chose",
        *(described(cls) for cls in classes()),
    ]
    if going:
        parts += ["## Deprecated", "\n".join(f"- {text}" for text in going.values())]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def main() -> int:
    if bare := undocumented():
        print("without documentation: " + ", ".join(bare), file=sys.stderr)
        return 1
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else None
    if record is not None and (gone := removed_too_soon(record)):
        print(
            f"gone from the contract without a minor release of warning: {', '.join(gone)}; list them in "
            "DEPRECATED of plugins/deprecation.py first",
            file=sys.stderr,
        )
        return 1
    deprecated = {each.name: list(each.since) for each in deprecation.DEPRECATED}
    names = json.dumps({"deprecated": deprecated, "names": surface()}, indent=1) + "\n"
    wanted = {PAGE: page(), RECORD: names}
    if "--check" in sys.argv:
        stale = [p.name for p, t in wanted.items() if not p.is_file() or p.read_text("utf-8") != t]
        if stale:
            print(f"not current: {', '.join(stale)}", file=sys.stderr)
        return 1 if stale else 0
    for path, text in wanted.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
