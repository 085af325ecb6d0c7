"""What of the XLA backend can be checked where torch_xla is not installed. `tests/lanes/xla` runs the rest."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

from octavo.backends.xla import backend as xla
from octavo.core.config import ConfigError
from octavo.core.lanes import LaneSet
from octavo.core.warm_up import example_batches
from octavo.plugins import KVSpec, Limits, ModelShape, Probe
from octavo.plugins.manager import plugins

BACKENDS = (xla.XlaBackend(), xla.TpuBackend())


def shape(max_position: int = 4096) -> ModelShape:
    kv = KVSpec((0, 1), 8, 128, 128)
    return ModelShape("Llama", 2, 4096, 32, 8, 128, 32000, max_position, 1, (kv,))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_the_probe_imports_nothing_and_says_what_to_install(backend: xla.XlaBackend) -> None:
    code = (
        "import sys; from octavo.backends.xla.plugin import octavo_backends\n"
        "print([b.probe() for b in octavo_backends()])\n"
        "assert not {'torch', 'torch_xla', 'jax'} & set(sys.modules), sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if find_spec("torch_xla") is None:
        assert backend.probe().devices == ()
        assert backend.probe().reason == ("torch_xla is not installed: pip install 'octavo[xla]'")


def test_torch_xla_of_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cpu", "torch_xla": "2.9.0"}
    monkeypatch.setattr(xla, "find_spec", lambda name: object())
    monkeypatch.setattr(xla.metadata, "version", versions.__getitem__)
    assert "torch_xla 2.9.0 needs torch 2.9, here is 2.13.0+cpu" in xla.unusable()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize(("seqs", "tokens"), [(1, None), (64, None), (100, 1000), (256, 8192)])
def test_plans_are_static(backend: xla.XlaBackend, seqs: int, tokens: int | None) -> None:
    limits = Limits(max_num_seqs=seqs, max_model_len=4096, max_num_batched_tokens=tokens)
    plan = backend.plan(shape(), "tpu", limits)
    assert plan == backend.plan(shape(), "tpu", limits)
    LaneSet(plan.lanes, plan.max_logits_rows)  # the core can drive them
    prompts, decodes = plan.lanes
    assert prompts.token_buckets[-1] >= prompts.max_tokens >= seqs
    assert decodes.token_buckets[-1] >= seqs
    for lane in plan.lanes:
        assert all(size % xla.SMALLEST == 0 for size in lane.token_buckets)
        assert lane.seq_buckets[-1] >= seqs
        assert lane.block_buckets[-1] * plan.block_size >= 4096
        assert lane.row_buckets[-1] <= plan.max_logits_rows
        table = lane.seq_buckets[-1] * lane.block_buckets[-1] * 4
        assert table <= xla.TABLE_BYTES or plan.block_size == 256
    assert plan.block_size in backend.capabilities("tpu").block_sizes
    assert len(list(example_batches(plan.lanes))) <= 30, "each is a program to compile"


def test_several_chips_are_one_device() -> None:
    assert xla.words("tpu", 1) == ("tpu",)
    assert xla.words("tpu", 4) == ("tpu", "tpu:x2", "tpu:x4")
    assert xla.words("xla:cpu", 7) == ("xla:cpu", "xla:cpu:x2", "xla:cpu:x4")
    assert [xla.chips_of(word) for word in ("tpu", "xla:cpu", "tpu:x4")] == [1, 1, 4]
    for word in ("tpu:x", "tpu:x0", "tpu:xy"):
        with pytest.raises(ValueError, match="2, 4"):
            xla.chips_of(word)
    limits = Limits(max_num_seqs=8, max_model_len=512)
    one, four = (BACKENDS[1].plan(shape(), word, limits) for word in ("tpu", "tpu:x4"))
    assert (one.layout, one.world_size) == ("ranks", 1)
    assert four == replace(one, layout="spmd", world_size=4)


def test_a_number_of_chips_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla.XlaBackend, "probe", lambda _: Probe(xla.words("xla:cpu", 4)))
    assert plugins().resolve("xla:cpu:x4").device == "xla:cpu:x4"
    with pytest.raises(ConfigError, match="no such device; it has xla:cpu, xla:cpu:x2, xla:cpu:x4"):
        plugins().resolve("xla:cpu:x3")


def test_an_asked_for_block_size_stands() -> None:
    limits = Limits(max_num_seqs=64, max_model_len=4096, block_size=8)
    assert BACKENDS[1].plan(shape(), "tpu", limits).block_size == 8
