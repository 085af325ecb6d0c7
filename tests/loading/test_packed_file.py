"""Files of packed weights: what is written comes back, and nothing else is taken for it."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from octavo.core.loading.packed_file import (
    ALIGNMENT,
    PackedFile,
    UnusableError,
    remove_orphans,
)

DICE = np.random.default_rng(7)
WEIGHTS = {
    name: DICE.integers(0, 256, size, np.uint8)
    for name, size in {"a": 100_000, "b": 1, "c": ALIGNMENT, "d": 3 * ALIGNMENT + 5}.items()
}


def file_at(path: Path, **key: object) -> PackedFile:
    return PackedFile(path / "some" / "folder" / "w.packed", {"dtype": "x", **key}, str(path))


def written(path: Path) -> PackedFile:
    kept = file_at(path)
    assert kept.read() is None
    assert kept.write(WEIGHTS)
    return kept


def test_what_is_written_comes_back_aligned(tmp_path: Path) -> None:
    kept = written(tmp_path)
    found = kept.read()
    assert found is not None and list(found) == list(WEIGHTS)
    for name, data in found.items():
        assert data.ctypes.data % ALIGNMENT == 0
        np.testing.assert_array_equal(data, WEIGHTS[name])
    visible = [path.name for path in kept.path.parent.iterdir() if path.suffix != ".lock"]
    assert visible == ["w.packed"]


def test_many_names_need_a_longer_header(tmp_path: Path) -> None:
    kept = file_at(tmp_path)
    many = {f"layer.{i}.with.a.long.name": np.full(3, i % 256, np.uint8) for i in range(2000)}
    kept.write(many)
    found = kept.read()
    assert found is not None and all(found[n][0] == i % 256 for i, n in enumerate(many))


def test_a_mapping_outlives_the_file(tmp_path: Path) -> None:
    """A new version replaces the file while an engine still computes with the old one."""
    kept = written(tmp_path)
    found = kept.read()
    kept.write({"a": np.zeros(100_000, np.uint8)})
    kept.path.unlink()
    assert found is not None
    np.testing.assert_array_equal(found["a"], WEIGHTS["a"])


def test_another_key_is_told(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(UnusableError, match="made from another dtype, more"):
        file_at(tmp_path, dtype="y", more=1).read()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda raw: raw[:-1], "bytes of"),
        (lambda raw: raw[: ALIGNMENT + 7], "bytes of"),
        (lambda raw: raw[:40], "cut off"),
        (lambda raw: b"", "cannot be read"),
        (lambda raw: b"GGUF" + raw[4:], "no packed weights"),
        (lambda raw: raw[:20] + b"\xff" + raw[21:], "header is damaged"),
        (lambda raw: raw.replace(b'"weights"', b'"weighty"'), "header is damaged"),
        (lambda raw: raw[:ALIGNMENT] + bytes(len(raw) - ALIGNMENT), "a is damaged"),
        (lambda raw: raw[:-ALIGNMENT] + bytes(ALIGNMENT), "d is damaged"),
    ],
)  # fmt: skip
def test_damage_is_told(tmp_path: Path, damage: object, told: str) -> None:
    kept = written(tmp_path)
    kept.path.write_bytes(damage(kept.path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UnusableError, match=told):
        kept.read()


def test_two_do_not_write_at_once(tmp_path: Path) -> None:
    kept = written(tmp_path)
    with FileLock(kept.path.with_name(".w.packed.lock")):
        assert not kept.write({"a": np.zeros(1, np.uint8)})
    found = kept.read()
    assert found is not None and set(found) == set(WEIGHTS)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """As on a full disk: the system writes the beginning and no more."""
    kept = written(tmp_path)
    before = kept.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError):
            kept.write(WEIGHTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept.path.read_bytes() == before
    assert not [path for path in kept.path.parent.iterdir() if path.name.endswith(".tmp")]


def test_what_a_killed_process_left_is_written_over(tmp_path: Path) -> None:
    kept = file_at(tmp_path)
    kept.path.parent.mkdir(parents=True)
    kept.path.with_name(".w.packed.tmp").write_bytes(b"x" * 1_000_000)
    assert kept.write(WEIGHTS) and kept.read() is not None
    assert kept.path.stat().st_size < 500_000


def test_files_of_models_that_are_gone_are_removed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    kept = [PackedFile(tmp_path / f"{n}.packed", {}, str(model / n)) for n in ("here", "gone")]
    (model / "here").write_bytes(b"")
    for each in kept:
        each.write(WEIGHTS)
    other = tmp_path / "other.packed"
    other.write_bytes(b"something of the user's")
    remove_orphans([*(each.path for each in kept), other, tmp_path / "missing.packed"])
    assert sorted(path.name for path in tmp_path.glob("*.packed")) == [
        "here.packed",
        "other.packed",
    ]
