"""Paged attention: launching the kernels of `attention_device` over work items of `attention_plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.kernels.triton.attention_device import attention_kernel, combine_kernel
from octavo.kernels.triton.attention_plan import Cut
from octavo.kernels.triton.kv_cache import PLAIN, codes_of, padded, takes_fp8
from octavo.kernels.triton.runtime import interpreted, launch
from octavo.kernels.triton.tiles import ARCHS, Tile, over_codes, tile, widest_head
from octavo.kernels.triton.variants import SHORT, Variant

if TYPE_CHECKING:
    import torch

    from octavo.kernels.triton.kv_cache import Cache

PARTS = 16
"""Partial results that `combine_kernel` takes at a time."""

PREFILL, DECODE = "attention_prefill", "attention_decode"


@dataclass(frozen=True, slots=True)
class Shape:
    """What all attention layers that share work items have in common. dtype: of the queries."""

    q_heads: int
    kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str
    arch: str

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.kv_heads

    def tile(self, kernel: str) -> Tile:
        return tile(kernel, self.arch, padded(max(self.head_size, self.head_size_v)), self.dtype)

    def heads(self, kernel: str) -> int:
        """Query heads in a program's tile: all that share a KV head, if they fit."""
        return min(self.group, self.tile(kernel).block_m)

    def cut(self, kernel: str, workers: int, window: int) -> Cut:
        """How this kernel's work is cut on a chip that runs so many programs at once."""
        tile, heads = self.tile(kernel), self.heads(kernel)
        return Cut(
            tokens=tile.block_m // heads,
            keys=tile.block_n,
            programs=self.kv_heads * -(-self.group // heads),
            workers=workers,
            window=window,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """Work items on the device, all for one of the two tiles.

    items int32 [I, FIELDS]; merges int32 [M, FIELDS], of which there are none when parts is 0; parts:
    partial results to make room for; tokens: the most query tokens of a tile that is merged.
    """

    kernel: str
    items: torch.Tensor
    merges: torch.Tensor
    parts: int
    tokens: int


def attend(
    q: torch.Tensor,
    cache: Cache,
    out: torch.Tensor,
    work: Work,
    shape: Shape,
    steps: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Computes the rows of out [T, Hq, Dv] that `work` names; others stay as they are.

    steps: block tables (flat), query_start and context_lens, int32. The last dimension of q and out has
    stride 1, and the caches have no gaps. `window` must be the one that the work was cut for.
    """
    tables, query_start, context_lens = steps
    tile, heads = shape.tile(work.kernel), shape.heads(work.kernel)
    tiles = -(-shape.group // heads)
    if cache.codes != PLAIN:
        tile = over_codes(tile, work.kernel, shape.arch)
    split = work.parts > 0
    part_out, part_lse = out, out
    if split:
        rows = work.parts * shape.kv_heads * tiles * tile.block_m
        part_out = out.new_empty((rows, shape.head_size_v), dtype=cache.k_scales.dtype)
        part_lse = out.new_empty(rows, dtype=cache.k_scales.dtype)
    sink = context_lens if sinks is None else sinks
    sizes = {
        "GROUP": shape.group,
        "HEADS": heads,
        "D_V": shape.head_size_v,
        "BLOCK_DV": padded(shape.head_size_v),
        "BLOCK_M": tile.block_m,
        "SINKS": sinks is not None,
    }
    launch(
        attention_kernel,
        (work.items.shape[0], shape.kv_heads * tiles),
        *(q, cache.k, cache.v, out, part_out, part_lse, work.items, tables, query_start),
        *(context_lens, sink, cache.k_scales, cache.v_scales, scale, softcap, window),
        *(*q.stride()[:2], *out.stride()[:2]),
        tile=tile,
        KV_HEADS=shape.kv_heads,
        D=shape.head_size,
        BLOCK_D=padded(shape.head_size),
        BLOCK_SIZE=cache.k.shape[1],
        BLOCK_N=tile.block_n,
        WINDOW=window > 0,
        SOFTCAP=softcap > 0,
        SPLIT=split,
        CODES=cache.codes,
        # The interpreter computes with bfloat16's bits as if they were whole numbers.
        WIDE=shape.dtype == "bfloat16" and interpreted(),
        **sizes,
    )
    if split:
        launch(
            combine_kernel,
            (work.merges.shape[0], shape.q_heads, work.tokens),
            *(part_out, part_lse, out, work.merges, query_start, sink, *out.stride()[:2]),
            tile=COMBINE,
            PARTS=PARTS,
            **sizes,
        )


COMBINE = Tile(1, 1, 1, 4)


# ------------------------------------------------------------------------ what is compiled ahead

_STRIDES = ("q_stride_t", "q_stride_h", "out_stride_t", "out_stride_h")


def _variant(
    kernel: str, dtype: str, size: int, *, split: bool, block: int = 16, extras: bool = False,
    kv: str = "",
) -> Variant:  # fmt: skip
    """A layer with groups of four query heads. extras: with a window, a soft cap and sinks; kv: the dtype
    of the cache, if not the queries'."""
    short, group = SHORT[dtype], 4

    def tile_on(arch: str) -> Tile:
        plain = tile(kernel, arch, padded(size), dtype)
        return over_codes(plain, kernel, arch) if kv else plain

    cache = "*u8" if kv else f"*{short}"
    types = dict.fromkeys(("q", "out"), f"*{short}") | dict.fromkeys(("k_cache", "v_cache"), cache)
    types |= dict.fromkeys(("part_out", "part_lse"), "*fp32" if split else f"*{short}")
    types |= dict.fromkeys(("items", "tables", "query_start", "context_lens"), "*i32")
    types |= {"sinks": "*fp32" if extras else "*i32"}
    types |= dict.fromkeys(("k_scales", "v_scales"), "*fp32")
    types |= {"scale": "fp32", "cap": "fp32", "window": "i32"} | dict.fromkeys(_STRIDES, "i32")
    words = [kernel, short, f"d{size}", f"block{block}", kv, "split" * split, "extras" * extras]
    return Variant(
        " ".join(word for word in words if word),
        attention_kernel,
        {name: types[name] for name in attention_kernel.arg_names if name in types},
        {
            **{
                "KV_HEADS": 8,
                "GROUP": group,
                "HEADS": group,
                "D": size,
                "D_V": size,
                "BLOCK_D": padded(size),
            },
            **{"BLOCK_DV": padded(size), "BLOCK_SIZE": block, "WINDOW": extras, "SOFTCAP": extras},
            **{"SINKS": extras, "SPLIT": split, "WIDE": False},
        },
        tile=tile_on,
        tiled={"BLOCK_M": "block_m", "BLOCK_N": "block_n"},
        for_arch=lambda arch: {"CODES": codes_of(kv, arch) if kv else PLAIN},
        aligned=_STRIDES,
        tensor_cores=dtype != "float32",
        archs=tuple(
            arch
            for arch in ARCHS
            if size <= widest_head(arch, dtype) and (not kv or takes_fp8(arch))
        ),
    )


def _combine_variant(dtype: str, size: int) -> Variant:
    floats = {"part_out": "*fp32", "part_lse": "*fp32", "out": f"*{SHORT[dtype]}"}
    return Variant(
        f"attention_combine {SHORT[dtype]} d{size}",
        combine_kernel,
        floats
        | {"merges": "*i32", "query_start": "*i32", "sinks": "*fp32"}
        | {"out_stride_t": "i32", "out_stride_h": "i32"},
        {
            **{"GROUP": 4, "HEADS": 4, "D_V": size, "BLOCK_DV": padded(size), "BLOCK_M": 16},
            **{"PARTS": PARTS, "SINKS": True},
        },
        tile=lambda arch: COMBINE,
        aligned=("out_stride_t", "out_stride_h"),
    )


AOT: list[Variant] = [
    *(
        _variant(kernel, dtype, size, split=kernel == DECODE)
        for kernel in (PREFILL, DECODE)
        for dtype, sizes in (
            ("bfloat16", (64, 96, 128, 256)),
            ("float16", (128,)),
            ("float32", (64, 128, 256)),
        )
        for size in sizes
    ),
    *(
        _variant(kernel, "bfloat16", 128, split=True, extras=True, block=block)
        for kernel in (PREFILL, DECODE)
        for block in (16, 128)
    ),
    *(
        _variant(kernel, dtype, 128, split=True, kv="fp8")
        for kernel in (PREFILL, DECODE)
        for dtype in ("bfloat16", "float16")
    ),
    *(_combine_variant(dtype, 128) for dtype in ("bfloat16", "float16", "float32")),
]
