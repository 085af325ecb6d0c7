"""Two ranks over the stand-in's HCCL: a product whose inner dimension is cut gives every rank the sum."""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octavo.core.config import ConfigError


@dataclass(frozen=True)
class Group:
    rank: int
    size: int
    init_method: str


def rank_of_two(rank: int, meeting: str, standin_path: str, results: Any) -> None:
    sys.path.insert(0, standin_path)
    import torch

    from octavo.backends.gaudi.backend import GaudiBackend
    from octavo.plugins import Limits, WeightSpec

    backend = GaudiBackend()
    backend.start("hpu", Limits(max_num_seqs=1, max_model_len=128))
    communicator = backend.communicator(Group(rank, 2, meeting))
    torch.manual_seed(1)
    x, weight = torch.randn(3, 16), torch.randn(5, 16)
    half = slice(8 * rank, 8 * rank + 8)
    ops = backend.ops("hpu")
    spec = WeightSpec("w", "linear", (("w", (5, 8)),), shard_axis=1)
    with torch.inference_mode():
        packed = ops.pack_weight({"w": weight[:, half]}, spec, "float32")
        got = ops.linear(x[:, half].to("hpu"), packed, reduce="sum").cpu()
    wanted = x.double() @ weight.double().T
    results.put((communicator.rank, communicator.size, float((got - wanted).abs().max())))
    communicator.close()


def test_the_sum_over_two_ranks(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    meeting = f"file://{tmp_path / 'meeting'}"
    standin_path = str(Path(__file__).parent / "standin")
    ranks = [
        context.Process(target=rank_of_two, args=(rank, meeting, standin_path, results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    found = sorted(results.get(timeout=200) for _ in ranks)
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert [f[:2] for f in found] == [(0, 2), (1, 2)]
    assert all(error < 1e-5 for *_, error in found)


def test_a_group_of_one_needs_no_library(standin: Any) -> None:
    from octavo.backends.gaudi.backend import GaudiBackend

    assert GaudiBackend().communicator(Group(0, 1, "")).size == 1


def test_a_meeting_that_fails_is_explained(standin: Any) -> None:
    from octavo.backends.gaudi.backend import GaudiBackend

    with pytest.raises(ConfigError, match=r"rank 0 of 2 could not join the HCCL group at nowhere"):
        GaudiBackend().communicator(Group(0, 2, "nowhere"))
