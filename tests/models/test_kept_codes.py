"""Engines over GGUF files whose weights stay in the file's codes: the bits of float32, from less memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_models import VOCAB, original_weights, write_gguf
from tiny_models import engine, everything, greedy, run

from octavo.core.loading.errors import WeightsError
from octavo.core.loading.gguf import GgufFile
from octavo.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the kernels are not compiled")

FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "Q4_0": ("llama", {"kind": Kind.Q4_0}),
    "Q4_1": ("llama", {"kind": Kind.Q4_1}),
    "Q5_0": ("qwen2", {"kind": Kind.Q5_0}),
    "Q8_0": ("qwen2", {"kind": Kind.Q8_0}),
    "as usual": ("llama", {"kind": Kind.Q4_1, "kinds": {"embed": Kind.Q8_0}}),
    "stacked of two kinds": ("llama", {"kind": Kind.Q4_0, "kinds": {"v_proj": Kind.Q8_0}}),
    "some plain": ("llama", {"kind": Kind.Q4_1, "kinds": {"embed": Kind.F32, "down": Kind.Q5_1}}),
}
KEPT = {"stacked of two kinds": 8, "some plain": 6}  # of 10 matrices, a tied head among them
PROMPTS = [list(range(1, 30)), [7, 3, 9], list(range(31, 2, -2))]


def file_of(name: str, tmp_path: Path) -> Path:
    family, how = FILES[name]
    # As a trained model's: answers depend on the prompt.
    weights = {n: w * (0.3 if w.ndim == 2 else 1) for n, w in original_weights(family).items()}
    write_gguf(tmp_path / "m.gguf", family, weights, **how)
    return tmp_path / "m.gguf"


def logprobs(path: Path, **options: Any) -> tuple[torch.Tensor, Any]:
    """[positions, V] over the prompts and five tokens after each, and what the engine says of itself."""
    made = engine(path, device="cpu", max_num_batched_tokens=24, **options)
    requests = [
        greedy(str(i), p, 5, logprobs=-1, prompt_logprobs=-1) for i, p in enumerate(PROMPTS)
    ]
    found = run(made, *requests)
    info = made.info
    made.shutdown()
    return torch.cat([everything(found[r.id]) for r in requests])[:, :VOCAB], info


@pytest.mark.parametrize("name", FILES)
def test_bits_are_those_of_float32(name: str, tmp_path: Path) -> None:
    path = file_of(name, tmp_path)
    kept, info = logprobs(path)
    plain, other = logprobs(path, keep_codes=False)
    assert kept.shape == (sum(map(len, PROMPTS)) + 4 * len(PROMPTS), VOCAB) and kept.std() > 0.1
    assert torch.equal(kept, plain)
    count = KEPT.get(name, 10)
    note = f"{count} of "
    assert any(n.startswith(note) and "checkpoint's codes" in n for n in info.notes), info.notes
    assert not any("checkpoint's codes" in n for n in other.notes)
    assert info.weight_bytes < other.weight_bytes
    assert (
        (info.numbers, info.kv_dtype) == (other.numbers, other.kv_dtype) == ("float32", "float32")
    )


def test_packed_codes_are_read_by_the_next_start(tmp_path: Path) -> None:
    path = file_of("as usual", tmp_path)
    cache: dict[str, Any] = {"packed_cache": True, "cache_dir": str(tmp_path / "cache")}
    first, _ = logprobs(path, **cache)
    for thread in threading.enumerate():
        if thread.name == "octavo-packed-weights":
            thread.join()
    assert len(list(tmp_path.rglob("float32-codes4-codes8-*.packed"))) == 1
    # Other numbers behind the same size and time, which nobody can tell without reading.
    status, begin = path.stat(), min(t.offset for t in GgufFile(path).tensors.values())
    path.write_bytes(path.read_bytes()[:begin] + bytes(status.st_size - begin))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    again, _ = logprobs(path, **cache)
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"quantization": "int8"},
        {"device": "reference"},
    ],
)
def test_where_nothing_is_kept(options: dict[str, Any], tmp_path: Path) -> None:
    """Other dtypes would round what the codes stand for; the portable ops unpack at every use."""
    made = engine(file_of("Q4_1", tmp_path), **{"device": "cpu", **options})
    assert not any("checkpoint's codes" in note for note in made.info.notes)
    made.shutdown()


def test_scales_that_no_code_can_have_are_told(tmp_path: Path) -> None:
    path = file_of("Q4_0", tmp_path)
    block = GgufFile(path).tensors["blk.1.ffn_down.weight"].offset
    raw = bytearray(path.read_bytes())
    raw[block : block + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(raw)
    with pytest.raises(
        WeightsError, match="have scales beyond what codes4 holds; use --no-keep-codes"
    ):
        logprobs(path)
