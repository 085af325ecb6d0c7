"""docs/plugins: what an author is told to type and to write, typed and written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from installed import builds_wheels
from tiny_models import engine, greedy, make, prompt_of, reference, run, tokens_of

from octavo.core.entry import wiring
from octavo.plugins import API_VERSION, Backend, Ops, hookimpl
from octavo.plugins.manager import Plugins

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "plugins"
SCRIPT = ROOT / "ci" / "make_contract.py"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEP = re.compile(
    r"(?P<before>[^\n]*\n?[^\n]*)\n\n```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.M | re.S
)


def text(page: str) -> str:
    return (PAGES / page).read_text("utf-8")


# ------------------------------------------------------------------------------------ the tutorial


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment of one's own that has all of this one, and pip's installations apart."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    scheme = sysconfig.get_path(
        "purelib", vars={"base": str(home), "platbase": str(home)}, scheme="venv"
    )
    here = [p for p in sys.path if p.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in here]
    (Path(scheme) / "all_of_the_other.pth").write_text("\n".join(lines))
    for name, module in (("pip", "pip"), ("octavo", "octavo.core.entry.cli.main")):
        script = home / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {home}/bin/python -m {module} "$@"\n')
        script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    if builds_wheels():
        environment |= {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    yield environment
    shutil.rmtree(home)


def type_in(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_tutorial_from_its_first_line_to_its_last(
    tmp_path: Path, bench: dict[str, str]
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    said, old, done = "", None, []
    for step in STEP.finditer(text("tutorial.md")):
        before, kind, body = step["before"], step["kind"], step["body"]
        named = re.findall(r"`(octavo-mychip/[\w./]+)`", before)
        if kind == "sh":
            for command in body.splitlines():
                said = type_in(command, folder, bench)
                done.append(command)
                if "--only rms_norm" in command:
                    assert re.search(r"rms_norm +float32 +passed.* c\+\+ *$", said, re.M), said
        elif before.endswith("becomes"):
            assert old is not None
            path, line = old
            source = path.read_text()
            assert source.count(line) == 1, f"{line!r} stands not once in {path}"
            path.write_text(source.replace(line, body))
        elif "this line" in before:
            old = (folder / named[0], body)
        else:
            path = folder / named[0]
            path.write_text(body)
        done.append(kind)
    assert done.count("cpp") == 1 and done.count("python") >= 4 and "octavo devices mychip" in done
    assert re.search(r"rms_norm +c\+\+", said), "the last command shows the wheel's device"
    assert "installed" not in type_in("pip --version", folder, bench)


def test_every_block_of_the_tutorial_is_reached() -> None:
    page = text("tutorial.md")
    assert len(list(STEP.finditer(page))) == len(BLOCK.findall(page))


# --------------------------------------------------------------------------------------- snippets


def test_one_ops_files_are_the_examples() -> None:
    package = ROOT / "plugins" / "examples" / "octavo-fast-norm" / "octavo_fast_norm"
    for name in ("__init__.py", "kernel.py"):
        assert (package / name).read_text("utf-8").strip() in text("one-op.md"), name


def test_the_backend_of_fixed_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves as it stands there: the same tokens, and nothing is compiled after the start."""
    (_, body), *_ = [b for b in BLOCK.findall(text("static-shapes.md")) if b[0] == "python"]
    module = types.ModuleType("fixed_plugin_for_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(body, "static-shapes.md", "exec"), module.__dict__)
    module.octavo_backends = hookimpl(lambda: [module.FixedBackend()])  # type: ignore[attr-defined]
    found = Plugins([metadata.EntryPoint("fixed", module.__name__, "octavo")])
    for where in (wiring, sys.modules["octavo.core.entry.op_choice"]):
        monkeypatch.setattr(where, "plugins", lambda: found)
    model = make("Llama", {})
    model.save_pretrained(tmp_path)
    made = engine(tmp_path, device="fixed", max_num_seqs=8)
    compiled = made.stats().compilations
    requests = [greedy(f"r{i}", prompt_of(5 + 17 * i, seed=i), 9) for i in range(5)]
    answers = run(made, *requests)
    for request in requests:
        tokens, _ = reference(model, request.prompt_token_ids, 9)
        assert tokens_of(answers[request.id]) == tokens
    assert made.stats().compilations == compiled > 5


def test_snippets_that_only_say_something_run() -> None:
    for page in ("changes.md",):
        for kind, body in BLOCK.findall(text(page)):
            assert kind == "python"
            exec(compile(body, page, "exec"), {})


# ------------------------------------------------------------------------------ the pages by hand


@pytest.mark.parametrize(
    ("head", "cls"),
    [("`Backend`, with", Backend), ("`Ops`, each with a portable torch body:", Ops)],
)
def test_the_tables_of_operations_name_every_member(head: str, cls: type) -> None:
    table = text("operations.md").partition(f"\n{head}")[2].partition("\n| `")[2]
    rows = f"| `{table.partition(chr(10) * 2)[0]}".splitlines()
    firsts = [row.split("|")[1] for row in rows]
    named = [n for first in firsts for n in re.findall(r"`(\w+)", first)]
    members = {n for n in vars(cls) if not n.startswith("_")} - {"device"}
    assert sorted(named) == sorted(members)


def test_the_version_is_this_one() -> None:
    assert re.findall(r"`API_VERSION`, (\(.*?\))", text("operations.md")) == [str(API_VERSION)]


# ------------------------------------------------------------------------------- the contract's page


def test_the_contracts_page_is_current_and_complete() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, "run: python ci/make_contract.py\n" + done.stderr


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import make_contract

    return make_contract


def test_what_is_not_documented_is_found(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo import plugins
    from octavo.plugins import hookspecs

    assert script.undocumented() == []

    class Bare:
        told: int = 0  # something
        untold: int = 0

        def method(self) -> None:
            pass

    monkeypatch.setattr(plugins, "__all__", [*plugins.__all__, "Bare"])
    monkeypatch.setattr(plugins, "Bare", Bare, raising=False)
    monkeypatch.setattr(hookspecs, "octavo_bare", lambda: None, raising=False)
    assert script.undocumented() == ["octavo_bare", "Bare", "Bare.untold", "Bare.method"]


def test_what_goes_without_warning_is_found(script: Any) -> None:
    names = script.surface()
    assert {"octavo_ops", "Lane", "Lane.kinds", "Ops.rms_norm", "Backend.name"} <= set(names)
    record = {"names": [*names, "Lane.gone", "Ops.listed", "Ops.early"]}
    record["deprecated"] = {"Ops.listed": [1, 0], "Ops.early": list(script.contract.API_VERSION)}
    assert script.removed_too_soon(record) == ["Lane.gone", "Ops.early"]


def test_the_changes_name_this_version(script: Any) -> None:
    major, minor = script.contract.API_VERSION
    assert f"\n## {major}.{minor}\n" in text("changes.md")
    for each in script.deprecation.DEPRECATED:
        assert f"`{each.name}`" in text("changes.md")
