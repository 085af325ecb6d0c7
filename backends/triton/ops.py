"""The ops of a GPU: Triton kernels, and torch's libraries for matrix products.

A layer's KV handle is a `TritonKV`. Kernels run on the current stream and are never waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from octavo.backends.triton.inputs import Key, TritonInputs
from octavo.backends.triton.transfer import STAGING_BYTES, HostTransfer, side_stream
from octavo.core.ops import DTYPES
from octavo.kernels.triton import activation, attention, logprobs, rms_norm, rotary, sampling
from octavo.kernels.triton import copy as blocks
from octavo.kernels.triton.attention import Shape
from octavo.kernels.triton.kv_cache import Cache, codes_of, write
from octavo.kernels.triton.runtime import arch_of
from octavo.plugins import KVSpec, Ops, SampleInputs

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(eq=False)
class Pool:
    """The caches of all layers of one engine, and how block copies reach them."""

    num_blocks: int
    known: dict[tuple[int, ...], blocks.Caches] = field(default_factory=dict)

    def caches(self, handles: Sequence[TritonKV]) -> blocks.Caches:
        """The caches of some layers, for the copy kernels."""
        key = tuple(handle.layer for handle in handles)
        found = self.known.get(key)
        if found is None:
            tensors = [t for handle in handles for t in (handle.cache.k, handle.cache.v)]
            found = self.known[key] = blocks.Caches.of(tensors)
        return found


@dataclass(frozen=True, slots=True)
class TritonKV:
    """One layer's cache."""

    cache: Cache
    pool: Pool
    layer: int


def storage_dtype(kv_dtype: str) -> torch.dtype:
    """The dtype that numbers of a cache are stored in: codes of 8 bits as bytes."""
    return torch.uint8 if kv_dtype == "fp8" else DTYPES[kv_dtype]


class TritonOps(Ops):
    """NVIDIA and AMD GPUs, and Triton's interpreter on the CPU.

    Args:
        device: torch device.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._device = torch.device(device)
        self.arch = arch_of(self._device)

    # ------------------------------------------------------------------------------- KV cache

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        width = storage_dtype(spec.dtype).itemsize
        return block_size * spec.kv_heads * (spec.head_size + spec.head_size_v) * width

    def alloc_kv(
        self, groups: Sequence[KVSpec], num_blocks: int, block_size: int
    ) -> list[TritonKV]:
        pool = Pool(num_blocks)
        made: dict[int, TritonKV] = {}
        for spec in groups:
            dtype = storage_dtype(spec.dtype)
            codes = codes_of(spec.dtype, self.arch)
            for layer in spec.layers:
                shape = (num_blocks, block_size, spec.kv_heads)
                k, v = (
                    torch.empty(*shape, size, dtype=dtype, device=self._device)
                    for size in (spec.head_size, spec.head_size_v)
                )
                scales = torch.ones(2, spec.kv_heads, dtype=torch.float32, device=self._device)
                made[layer] = TritonKV(Cache(k, v, scales[0], scales[1], codes), pool, layer)
        return [made[layer] for layer in sorted(made)]

    def write_kv(
        self,
        handle: TritonKV,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: TritonInputs,
        group: int = 0,
    ) -> TritonKV:
        write(handle.cache, k, v, meta.slots[group], self.arch)
        return handle

    def copy_blocks(
        self, handles: list[TritonKV], pairs: Sequence[tuple[int, int]]
    ) -> list[TritonKV]:
        blocks.copy(handles[0].pool.caches(handles), pairs, self.arch)
        return handles

    def export_blocks(
        self, handles: list[TritonKV], ids: Sequence[int]
    ) -> torch.Tensor | HostTransfer:
        """The named blocks on their way to the host. They are packed on the current stream, so that
        later steps may write to them at once, and copied on one beside it."""
        caches = handles[0].pool.caches(handles)
        gpu = self._device.type == "cuda"
        row = caches.row * blocks.WORD
        host = torch.empty(len(ids), row, dtype=torch.uint8, pin_memory=gpu)
        index = torch.tensor(list(ids), dtype=torch.int64, device=self._device)
        if not gpu:
            blocks.pack(caches, index, host.view(torch.int32), self.arch)
            return host
        step = max(1, STAGING_BYTES // 2 // row)
        side, main = side_stream(self._device), torch.cuda.current_stream(self._device)
        buffers = [
            torch.empty(min(step, len(ids)), caches.row, dtype=torch.int32, device=self._device)
            for _ in range(min(2, -(-len(ids) // step)))
        ]
        copied: list[Any] = [None, None]
        for turn, start in enumerate(range(0, len(ids), step)):
            some = index[start : start + step]
            buffer = buffers[turn % 2][: len(some)]
            if copied[turn % 2] is not None:
                main.wait_event(copied[turn % 2])
            blocks.pack(caches, some, buffer, self.arch)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                part = host[start : start + len(some)]
                part.copy_(buffer.view(torch.uint8), non_blocking=True)
                copied[turn % 2] = side.record_event()
        for buffer in buffers:
            buffer.record_stream(side)
        return HostTransfer(host, side.record_event(), buffers)

    def import_blocks(
        self, src: torch.Tensor, handles: list[TritonKV], ids: Sequence[int]
    ) -> list[TritonKV]:
        """Blocks come over on a stream beside the current one, which waits for them before it puts
        them in place; later steps follow on that."""
        caches = handles[0].pool.caches(handles)
        index = torch.tensor(list(ids), dtype=torch.int64, device=self._device)
        words = src.contiguous().view(torch.int32)
        if self._device.type != "cuda":
            blocks.unpack(caches, index, words, self.arch)
            return handles
        step = max(1, STAGING_BYTES // 2 // (caches.row * blocks.WORD))
        side, main = side_stream(self._device), torch.cuda.current_stream(self._device)
        for start in range(0, len(ids), step):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                buffer = words[start : start + step].to(self._device, non_blocking=True)
            main.wait_stream(side)
            blocks.unpack(caches, index[start : start + step], buffer, self.arch)
            buffer.record_stream(main)
        return handles

    # ------------------------------------------------------------------------------ attention

    def paged_attention(
        self,
        q: torch.Tensor,
        handle: TritonKV,
        meta: TritonInputs,
        *,
        scale: float,
        group: int = 0,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        cache = handle.cache
        kv_heads, size_v = cache.k.shape[2], cache.v.shape[3]
        shape = Shape(q.shape[1], kv_heads, q.shape[2], size_v, NAMES[q.dtype], self.arch)
        # Rows of padding take part in the rest of the layer: they must be finite.
        made = torch.empty if meta.covers_all_rows() else torch.zeros
        out = made((*q.shape[:2], size_v), dtype=q.dtype, device=q.device)
        steps = (meta.block_tables[group], meta.fields.query_start, meta.fields.context_lens)
        for work in meta.attention(Key(shape, group, window)):
            attention.attend(
                q, cache, out, work, shape, steps,
                scale=scale, window=window, softcap=softcap, sinks=sinks,
            )  # fmt: skip
        return out

    # -------------------------------------------------------------------- the rest of a layer

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
    ) -> torch.Tensor:
        return rms_norm.rms_norm(x, weight, eps, offset=offset)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm.add_rms_norm(x, residual, weight, eps, offset=offset)

    def rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        meta: TritonInputs,
        *,
        interleaved: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary.rotary(q, k, cos_sin, meta.positions, interleaved=interleaved)

    def act_and_mul(
        self, x: torch.Tensor, kind: Literal["silu", "gelu", "gelu_tanh"]
    ) -> torch.Tensor:
        return activation.act_and_mul(x, kind)

    def sample(self, logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
        if rows.all_greedy:
            return sampling.greedy(logits)
        return sampling.sample(
            logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.counter
        )

    def token_logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return logprobs.token_logprobs(logits, ids)
