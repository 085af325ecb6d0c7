"""GGUF blocks -> float32, bit for bit what gguf.quants computes.

The common types are written here with torch operations, several times as fast as numpy's; every
other type goes through gguf.quants. Formats: ggml-quants.c of the ggml project. In each block ``d``
is a float16 scale, ``m`` a float16 offset; multiplications and additions are kept apart, because a
fused one would round differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16 = 0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30
_CHUNK_BLOCKS = {32: 1 << 15, 256: 1 << 12}  # 4 MiB of float32 at a time: stays in the cache


def dequantize(raw: torch.Tensor, kind: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Tensor ``raw`` (uint8 [nbytes]) of ggml type ``kind`` as float32 of ``shape``.

    F32 shares ``raw``'s memory; everything else is new.
    """
    import torch

    if kind == F32:
        return raw.view(torch.float32).view(shape)
    if kind in (F16, BF16):
        half = torch.float16 if kind == F16 else torch.bfloat16
        return raw.view(half).view(shape).to(torch.float32)
    if kind not in _KERNELS:
        return _by_gguf(raw, kind, shape)
    block, width, kernel = _KERNELS[kind]
    blocks = raw.view(-1, width)
    out = torch.empty(blocks.shape[0], block, dtype=torch.float32)
    step = _CHUNK_BLOCKS[block]
    for start in range(0, blocks.shape[0], step):
        kernel(blocks[start : start + step], out[start : start + step])
    return out.view(shape)


def _by_gguf(raw: torch.Tensor, kind: int, shape: tuple[int, ...]) -> torch.Tensor:
    import torch
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as by_gguf

    rows = raw.view(-1, raw.numel() // max(1, _rows(shape))).numpy()
    return torch.from_numpy(by_gguf(rows, GGMLQuantizationType(kind))).view(shape)


def _rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte ``at`` of each block, as float32 [blocks, 1]."""
    import torch

    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """packed uint8 [blocks, groups * n] -> out [blocks, groups, 2, n]: low halves, then high ones."""
    parts = packed.view(out.shape[0], out.shape[1], out.shape[3])
    out[:, :, 0] = parts & 0x0F
    out[:, :, 1] = parts >> 4


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    nibbles(blocks[:, 2:].contiguous(), out.view(-1, 1, 2, 16))
    out.sub_(8).mul_(half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    nibbles(blocks[:, 4:].contiguous(), out.view(-1, 1, 2, 16))
    out.mul_(half(blocks, 0)).add_(half(blocks, 2))


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The 32 high bits at byte ``at``, each worth 16: uint8 [blocks, 32]."""
    import torch

    shifts = torch.arange(8, dtype=torch.uint8)
    bits = blocks[:, at : at + 4].unsqueeze(-1) >> shifts & 1
    return (bits << 4).view(-1, 32)


def q5_0_codes(blocks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A Q5_0 block's codes in out [blocks, 32], of any dtype; returns it."""
    nibbles(blocks[:, 6:].contiguous(), out.view(-1, 1, 2, 16))
    return out.add_(_fifth_bits(blocks, 2)).sub_(16)


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    q5_0_codes(blocks, out).mul_(half(blocks, 0))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    nibbles(blocks[:, 8:].contiguous(), out.view(-1, 1, 2, 16))
    out.add_(_fifth_bits(blocks, 4)).mul_(half(blocks, 0)).add_(half(blocks, 2))


def q8_0_codes(blocks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The same of a Q8_0 block."""
    import torch

    return out.copy_(blocks[:, 2:].view(torch.int8))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    q8_0_codes(blocks, out).mul_(half(blocks, 0))


def k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A K block's eight scales and eight offsets, times d and dmin: float32 [blocks, 8, 1] each."""
    import torch

    d, m, both = (blocks[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scale = torch.cat([d & 0x3F, (both & 0x0F) | ((d >> 2) & 0x30)], dim=1)
    offset = torch.cat([m & 0x3F, (both >> 4) | ((m >> 2) & 0x30)], dim=1)
    scales = half(blocks, 0) * scale.to(torch.float32)
    offsets = half(blocks, 2) * offset.to(torch.float32)
    return scales.unsqueeze(-1), offsets.unsqueeze(-1)


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales, offsets = k_scales(blocks)
    nibbles(blocks[:, 16:].contiguous(), out.view(-1, 4, 2, 32))
    out.view(-1, 8, 32).mul_(scales).sub_(offsets)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    scales, offsets = k_scales(blocks)
    nibbles(blocks[:, 48:].contiguous(), out.view(-1, 4, 2, 32))
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = (blocks[:, 16:48].unsqueeze(1) >> shifts & 1) << 4
    out.view(-1, 8, 32).add_(high).mul_(scales).sub_(offsets)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    nibbles(blocks[:, :128].contiguous(), out.view(-1, 2, 2, 64))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    out.view(-1, 2, 4, 32).add_(high)
    scales = blocks[:, 192:208].view(torch.int8).to(torch.float32)
    scales = (half(blocks, 208) * scales).unsqueeze(-1)
    out.sub_(32).view(-1, 16, 16).mul_(scales)


_Kernel = Callable[["torch.Tensor", "torch.Tensor"], None]
# ggml type: (elements per block, bytes per block, kernel)
_KERNELS: dict[int, tuple[int, int, _Kernel]] = {
    Q4_0: (32, 18, _q4_0),
    Q4_1: (32, 20, _q4_1),
    Q5_0: (32, 22, _q5_0),
    Q5_1: (32, 24, _q5_1),
    Q8_0: (32, 34, _q8_0),
    Q4_K: (256, 144, _q4_k),
    Q5_K: (256, 176, _q5_k),
    Q6_K: (256, 210, _q6_k),
}
