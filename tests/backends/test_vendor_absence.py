"""Backends of Gaudi and Ascend where neither vendor's package is installed: explained, and in nobody's way."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from octavo.backends.ascend import vendor as ascend
from octavo.backends.ascend.backend import AscendBackend
from octavo.backends.gaudi.backend import GaudiBackend
from octavo.core.config import ConfigError
from octavo.core.lanes import LaneSet
from octavo.plugins import Backend, Limits, ModelShape
from octavo.plugins.manager import Plugins

VENDORS = ("torch_npu", "habana_frameworks")
BACKENDS = (GaudiBackend, AscendBackend)

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is not None for name in VENDORS), reason="a vendor's package is installed"
)


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (GaudiBackend(), ("habana_frameworks is not installed", "docs/backends/gaudi.md")),
        (AscendBackend(), ("torch-npu is not installed", "pip install 'octavo[ascend]'")),
    ],
)
def test_a_probe_says_what_to_install(backend: Backend, words: tuple[str, ...]) -> None:
    probe = backend.probe()
    assert not probe.devices and "\n" not in probe.reason
    assert all(w in probe.reason for w in words)


@pytest.mark.parametrize(("word", "name"), [("hpu", "gaudi"), ("npu:1", "ascend")])
def test_asking_for_one_is_refused_with_the_reason(word: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"backend '{name}' has no device: .* is not installed"):
        Plugins().resolve(word)


def test_others_are_chosen_automatically() -> None:
    found = Plugins()
    assert found.problems == []
    assert {row.word for row in found.devices()} >= {"cpu", "hpu", "npu", "reference"}
    assert found.resolve("auto").backend.name not in ("gaudi", "ascend")


@pytest.mark.parametrize("backend", [b() for b in BACKENDS], ids=lambda b: b.name)
def test_what_is_asked_before_a_start_needs_no_package(backend: Backend) -> None:
    word = backend.device_types[0]
    capabilities = backend.capabilities(word)
    assert capabilities.block_sizes == (128,) and "bfloat16" in capabilities.native_dtypes
    assert "executed on" in capabilities.notes
    shape = ModelShape("x", 2, 64, 4, 2, 16, 100, 4096, 10**6, ())
    limits = Limits(max_num_seqs=7, max_model_len=1000, max_num_batched_tokens=300)
    plan = backend.plan(shape, word, limits)
    assert plan == backend.plan(shape, word, limits) and plan.block_size == 128
    assert max(lane.max_seqs for lane in plan.lanes) == 7
    prompts = plan.lanes[0]
    assert prompts.max_tokens == 300 and max(prompts.token_buckets) >= 300
    for lane in plan.lanes:
        assert max(lane.block_buckets) >= 8  # a sequence of the longest context
        assert list(lane.token_buckets) == sorted(set(lane.token_buckets))
    LaneSet(plan.lanes, plan.max_logits_rows)  # raises when the core could not drive them


@pytest.mark.parametrize("backend", [b() for b in BACKENDS], ids=lambda b: b.name)
def test_starting_without_the_package_is_an_error_that_helps(backend: Backend) -> None:
    word = backend.device_types[0]
    limits = Limits(max_num_seqs=1, max_model_len=128)
    with pytest.raises(ConfigError, match=f"--device {word}: importing .* failed"):
        backend.start(word, limits)


def test_importing_them_imports_nothing_heavy() -> None:
    code = (
        "import octavo.backends.gaudi.plugin, octavo.backends.ascend.plugin, sys\n"
        "[b.probe() for m in (octavo.backends.gaudi.plugin, octavo.backends.ascend.plugin)\n"
        " for b in m.octavo_backends()]\n"
        f"assert not {{'torch', *{VENDORS!r}}} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_cann_without_a_device_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend, "find_spec", lambda name: object())
    with monkeypatch.context() as patch:
        patch.setattr(ascend, "CANN", "libno-such-library.so")
        assert "without CANN (libno-such-library.so is not found)" in (ascend.why_absent() or "")
    monkeypatch.setattr(ascend, "CANN", None)  # this very process: it can always be loaded
    monkeypatch.setattr(ascend, "device_nodes", list)
    assert "the driver shows no device" in (ascend.why_absent() or "")


@pytest.mark.parametrize("name", ["gaudi", "ascend"])
def test_their_pages_say_what_was_not_executed(name: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "backends" / f"{name}.md"
    text = page.read_text("utf-8")
    assert "No device" in text and f"pytest tests/lanes/{name}" in text
