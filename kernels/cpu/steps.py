"""What a kernel needs of a step or a layer, described once and checked there."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from octavo.kernels.cpu.library import dtype_code, host, kv_dtype_code

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.cpu.library import HostArray

BLOCK_MULTIPLE = 16  # block sizes are multiples of this
HEAD_MULTIPLE = 8  # head sizes are multiples of this


def _check_sizes(head_size: int, head_size_v: int, block_size: int) -> None:
    if block_size < 1 or block_size % BLOCK_MULTIPLE:
        raise ValueError(f"block size must be a multiple of {BLOCK_MULTIPLE}, not {block_size}")
    for size in (head_size, head_size_v):
        if not 8 <= size <= 256 or size % HEAD_MULTIPLE:
            raise ValueError(f"head size must be a multiple of 8 from 8 to 256, not {size}")


def kv_shapes(
    blocks: int,
    kv_heads: int,
    head_size: int,
    head_size_v: int,
    block_size: int,
    *,
    scales: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a layer's K and V cache: blocks are contiguous, K is transposed inside each.

    scales: of an int8 cache, [blocks, kv_heads, bytes]: a head's codes laid out like any other
    dtype's, then a float32 scale per position.
    """
    _check_sizes(head_size, head_size_v, block_size)
    if scales:
        return (
            (blocks, kv_heads, (head_size + 4) * block_size),
            (blocks, kv_heads, (head_size_v + 4) * block_size),
        )
    return (blocks, kv_heads, head_size, block_size), (blocks, kv_heads, block_size, head_size_v)


class WriteStep(ctypes.Structure):
    """Everything :func:`write_kv` needs that is the same for all layers of a step."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("k_row_stride", ctypes.c_int64),
        ("v_row_stride", ctypes.c_int64),
        ("x_dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("head_size_v", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("k_block_stride", ctypes.c_int64),
        ("v_block_stride", ctypes.c_int64),
    )

    def __init__(
        self,
        slots: HostArray,
        *,
        k_row_stride: int,
        v_row_stride: int,
        dtype: Any,
        kv_dtype: Any,
        kv_heads: int,
        head_size: int,
        head_size_v: int,
        block_size: int,
        block_strides: tuple[int, int] = (0, 0),
    ) -> None:
        """`slots` int64 [T]: block * block_size + offset for each token, negative to skip it.
        block_strides: elements from block to block of K and of V; 0 where they touch."""
        _check_sizes(head_size, head_size_v, block_size)
        address = host(slots, "slots", "int64", 1)
        super().__init__(
            address,
            len(slots),
            k_row_stride,
            v_row_stride,
            dtype_code(dtype),
            kv_dtype_code(kv_dtype),
            kv_heads,
            head_size,
            head_size_v,
            block_size,
            *block_strides,
        )
        self.keep = slots
        self.address = ctypes.addressof(self)

    def fill(self, slots: HostArray) -> None:
        """Takes another step's slots."""
        self.slots, self.tokens = host(slots, "slots", "int64", 1), len(slots)
        self.keep = slots


class AttentionLayer(ctypes.Structure):
    """Everything :func:`paged_attention` needs that one layer never changes."""

    _fields_ = (
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int32),
    )

    def __init__(
        self, scale: float, *, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> None:
        """`window` 0 for none, else the positions a query sees, itself included; `softcap` 0 for
        none; `sinks` float32 [q_heads], one more logit per head in the softmax's denominator.
        """
        if window < 0 or softcap < 0:
            raise ValueError(f"window {window} and softcap {softcap} must not be negative")
        address = None if sinks is None else host(sinks, "sinks", "float32", 1)
        super().__init__(address, scale, softcap, window)
        self.keep = sinks
        self.address = ctypes.addressof(self)


class AttentionStep(ctypes.Structure):
    """Everything :func:`paged_attention` needs that is the same for all layers of a step."""

    _fields_ = (
        ("block_tables", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("out_row_stride", ctypes.c_int64),
        ("q_row_stride", ctypes.c_int64),
        ("sequences", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
        ("q_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("head_size_v", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("k_block_stride", ctypes.c_int64),
        ("v_block_stride", ctypes.c_int64),
    )

    def __init__(
        self,
        block_tables: HostArray,
        query_start: HostArray,
        context_lens: HostArray,
        *,
        q_row_stride: int,
        out_row_stride: int,
        dtype: Any,
        kv_dtype: Any,
        q_heads: int,
        kv_heads: int,
        head_size: int,
        head_size_v: int,
        block_size: int,
        block_strides: tuple[int, int] = (0, 0),
    ) -> None:
        """int32 arrays: `block_tables` [S, blocks], `query_start` [S + 1], `context_lens` [S].

        Sequence s has the query rows query_start[s] to query_start[s + 1] (none: padding), the last
        ones of its context_lens[s] positions, whose keys and values are already written.
        block_strides: as for :class:`WriteStep`.
        """
        _check_sizes(head_size, head_size_v, block_size)
        if kv_heads < 1 or q_heads % kv_heads:
            raise ValueError(f"{q_heads} query heads do not divide over {kv_heads} KV heads")
        super().__init__(
            None,
            None,
            None,
            0,
            out_row_stride,
            q_row_stride,
            0,
            dtype_code(dtype),
            kv_dtype_code(kv_dtype),
            q_heads,
            kv_heads,
            head_size,
            head_size_v,
            block_size,
            *block_strides,
        )
        self.fill(block_tables, query_start, context_lens)
        self.address = ctypes.addressof(self)

    def fill(
        self, block_tables: HostArray, query_start: HostArray, context_lens: HostArray
    ) -> None:
        """Takes another step's arrays, as for a new one."""
        sequences, width = block_tables.shape
        if len(query_start) != sequences + 1 or len(context_lens) != sequences:
            raise ValueError(
                f"{sequences} block tables need {sequences + 1} query starts and {sequences} "
                f"context lengths, not {len(query_start)} and {len(context_lens)}"
            )
        self.block_tables = host(block_tables, "block_tables", "int32", 2)
        self.query_start = host(query_start, "query_start", "int32", 1)
        self.context_lens = host(context_lens, "context_lens", "int32", 1)
        self.table_stride, self.sequences = width, sequences
        self.keep = (block_tables, query_start, context_lens)
