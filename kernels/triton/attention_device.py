"""Paged attention over ragged batches: one kernel for prefill, decode and mixed steps.

A program takes one work item of `attention_plan` for one KV head: some query tokens of a sequence, with
all the query heads that share that KV head as rows of one tile, against a range of keys. It goes over
the keys once with a running softmax (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018; Dao et al., "FlashAttention", 2022). Where a sequence's keys are split between programs,
each stores a partial result with its log-sum, and `combine_kernel` merges them ("Flash-Decoding", 2023).

Keys of a block that were never written may hold anything, NaN too: they are masked when loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _numbers(x, dtype, CODES: tl.constexpr):
    """A loaded tile of the cache in `dtype`. Codes that are taken apart come out smaller by
    `code_factor`."""
    if CODES == 1:
        return x.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif CODES == 2:
        return x.to(tl.float8e4b8, bitcast=True).to(dtype)
    elif CODES == 3:
        wide = x.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def code_factor(CODES: tl.constexpr):
    """What the bits of an e4m3 code, read as float16, are short of: 2 to the difference of the
    exponents' biases."""
    if CODES == 3:
        return 256.0
    else:
        return 1.0


@triton.jit
def _walk(
    acc, total, most, q, k_head, v_head, table, begin, end, at, scale, cap, window,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    CODES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes keys [begin, end) into the running softmax, BLOCK_N at a time.

    at [M]: the rows' positions. MASKED: some row does not see some of these keys.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    # Block numbers are read one turn ahead and carried over: loads of keys that waited for a load in
    # their own turn could be kept in flight for half as many turns.
    if BLOCK_SIZE % BLOCK_N == 0:  # a tile of keys lies in one block
        block = tl.load(table + begin // BLOCK_SIZE, mask=begin < end, other=0)
    else:
        block = tl.load(table + (begin + n) // BLOCK_SIZE, mask=begin + n < end, other=0)
    for start in range(begin, end, BLOCK_N):
        key = start + n
        number = block.to(tl.int64)
        slot = (number * BLOCK_SIZE + key % BLOCK_SIZE) * KV_HEADS
        k_row, v_row = slot * D, slot * D_V
        after = start + BLOCK_N
        if BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(table + after // BLOCK_SIZE, mask=after < end, other=0)
        else:
            block = tl.load(table + (after + n) // BLOCK_SIZE, mask=after + n < end, other=0)
        k_at = k_head + k_row[None, :] + d[:, None]
        v_at = v_head + v_row[:, None] + dv[None, :]
        there = key < end
        if MASKED:
            k = tl.load(k_at, mask=there[None, :] & (d < D)[:, None], other=0)
        elif BLOCK_D != D:
            k = tl.load(k_at, mask=(d < D)[:, None], other=0)
        else:
            k = tl.load(k_at)
        score = tl.dot(q, _numbers(k, q.dtype, CODES), input_precision="ieee") * scale
        if SOFTCAP:
            # c · tanh(score / c), in powers of two: tanh(x) = 1 - 2 / (e^2x + 1)
            turned = tl.exp2(score * (2.0 * LOG2E / cap))
            score = (cap * LOG2E) * (1.0 - 2.0 / (turned + 1.0))
        if MASKED:
            seen = (key[None, :] <= at[:, None]) & (key < end)[None, :]
            if WINDOW:
                seen = seen & (key[None, :] > at[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        now = tl.maximum(most, tl.max(score, 1))
        base = now
        if MASKED:
            base = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen no key yet
        faded = tl.exp2(most - base)
        p = tl.exp2(score - base[:, None])
        total = total * faded + tl.sum(p, 1)
        if MASKED:
            v = tl.load(v_at, mask=there[:, None] & (dv < D_V)[None, :], other=0)
        elif BLOCK_DV != D_V:
            v = tl.load(v_at, mask=(dv < D_V)[None, :], other=0)
        else:
            v = tl.load(v_at)
        values = _numbers(v, q.dtype, CODES)
        acc = tl.dot(p.to(values.dtype), values, acc * faded[:, None], input_precision="ieee")
        most = now
    return acc, total, most


@triton.jit
def attention_kernel(
    q, k_cache, v_cache, out, part_out, part_lse, items, tables, query_start, context_lens, sinks,
    k_scales, v_scales, scale, cap, window,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, SPLIT: tl.constexpr, CODES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid: (items, KV heads x tiles of HEADS query heads).

    q [T, Hq, D], caches [blocks, block, Hkv, D], out [T, Hq, Dv], tables int32 (flat), query_start
    and context_lens int32, sinks [Hq] float32, scales [Hkv] float32. items [I, 8] int32:
    sequence (-1: nothing to do), first query token in it, first and last key (past the end), where its
    block table begins, index of the partial result or -1. part_out [P, Hq tiles, BLOCK_M, D_V] and
    part_lse [P, Hq tiles, BLOCK_M] float32, in powers of two.
    """
    item = items + tl.program_id(0) * 8
    sequence = tl.load(item)
    if sequence < 0:
        return
    first = tl.load(item + 1)
    begin = tl.load(item + 2)
    end = tl.load(item + 3)
    table = tables + tl.load(item + 4)
    tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    tokens: tl.constexpr = BLOCK_M // HEADS
    kv_head = tl.program_id(1) // tiles
    t0 = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - t0
    context = tl.load(context_lens + sequence)

    row = tl.arange(0, BLOCK_M)
    token = first + row // HEADS
    in_group = tl.program_id(1) % tiles * HEADS + row % HEADS
    live = (row < tokens * HEADS) & (token < queries) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    before = context - queries  # tokens of the sequence ahead of its queries
    at = before + token
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_rows = q + (t0 + token).to(tl.int64) * q_stride_t + head * q_stride_h
    queried = tl.load(
        q_rows[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
    )
    if WIDE:
        queried = queried.to(tl.float32)
    factor = scale
    if CODES != 0:
        factor = factor * tl.load(k_scales + kv_head) * code_factor(CODES)
    if not SOFTCAP:
        factor = factor * LOG2E

    # The host knows lengths as upper bounds; what is written here is exact.
    last = tl.minimum(first + tokens, queries) - 1  # the tile's last token
    end = tl.minimum(end, before + last + 1)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # Of a split sequence the sink joins when the parts are merged.
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        if SPLIT:
            whole = tl.load(item + 5) < 0
            most = tl.where(whole, sink, most)
            total = tl.where(whole, 1.0, total)
        else:
            most = sink
            total = total + 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    k_head = k_cache + kv_head * D
    v_head = v_cache + kv_head * D_V
    if BLOCK_M <= 16 or WINDOW:
        # A tile this small is cheap to mask, and one loop keeps its loads in flight to the end; a window
        # leaves few tiles that every row sees whole.
        acc, total, most = _walk(
            acc, total, most, queried, k_head, v_head, table, begin, end, at, factor, cap, window,
            KV_HEADS, D, D_V, BLOCK_D, BLOCK_DV,
            BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, CODES, True,
        )  # fmt: skip
    else:
        # Tiles of keys up to the first row's position are seen by every row, and need no mask.
        clear = tl.minimum((before + first + 1) // BLOCK_N * BLOCK_N, end)
        clear = tl.maximum(clear, begin)
        acc, total, most = _walk(
            acc, total, most, queried, k_head, v_head, table, begin, clear, at, factor, cap, window,
            KV_HEADS, D, D_V, BLOCK_D, BLOCK_DV,
            BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, CODES, False,
        )  # fmt: skip
        acc, total, most = _walk(
            acc, total, most, queried, k_head, v_head, table, clear, end, at, factor, cap, window,
            KV_HEADS, D, D_V, BLOCK_D, BLOCK_DV,
            BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, CODES, True,
        )  # fmt: skip

    empty = total == 0.0  # no key at all: padding
    result = acc / tl.where(empty, 1.0, total)[:, None]
    if CODES != 0:
        result = result * (tl.load(v_scales + kv_head) * code_factor(CODES))
    stored = live[:, None] & (dv < D_V)[None, :]
    out_at = (
        out
        + ((t0 + token).to(tl.int64) * out_stride_t + head * out_stride_h)[:, None]
        + dv[None, :]
    )
    if SPLIT:
        part = tl.load(item + 5)
        if part < 0:
            tl.store(out_at, result.to(out.dtype.element_ty), mask=stored)
        else:
            rows = (part * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * BLOCK_M + row
            lse = tl.where(empty, float("-inf"), most + tl.log2(tl.where(empty, 1.0, total)))
            tl.store(part_lse + rows, lse, mask=live)
            tl.store(part_out + rows[:, None] * D_V + dv[None, :], result, mask=stored)
    else:
        tl.store(out_at, result.to(out.dtype.element_ty), mask=stored)


@triton.jit
def combine_kernel(
    part_out, part_lse, out, merges, query_start, sinks, out_stride_t, out_stride_h,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merges partial results. Grid: (merges, query heads, tokens of a tile).

    merges [.., 8] int32: sequence (-1: nothing to do), first query token, first part, number of parts.
    """
    merge = merges + tl.program_id(0) * 8
    sequence = tl.load(merge)
    if sequence < 0:
        return
    token = tl.program_id(2)
    first = tl.load(merge + 1)
    t0 = tl.load(query_start + sequence)
    if first + token >= tl.load(query_start + sequence + 1) - t0:
        return
    part = tl.load(merge + 2)
    parts = tl.load(merge + 3)
    tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    head = tl.program_id(1)
    in_group = head % GROUP
    tile = head // GROUP * tiles + in_group // HEADS
    all_tiles = tl.num_programs(1) // GROUP * tiles
    row = tile * BLOCK_M + token * HEADS + in_group % HEADS
    stride = all_tiles * BLOCK_M  # rows from one part to the next
    lane = tl.arange(0, PARTS)
    dv = tl.arange(0, BLOCK_DV)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if SINKS:
        most = tl.zeros([1], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total = total + 1.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, parts, PARTS):
        there = start + lane < parts
        rows = (part + start + lane).to(tl.int64) * stride + row
        lse = tl.load(part_lse + rows, mask=there, other=float("-inf"))
        x = tl.load(
            part_out + rows[:, None] * D_V + dv[None, :],
            mask=there[:, None] & (dv < D_V)[None, :],
            other=0.0,
        )
        now = tl.maximum(most, tl.max(lse, 0))
        base = tl.where(now == float("-inf"), 0.0, now)
        faded = tl.exp2(most - base)
        weight = tl.exp2(lse - base)
        total = total * faded + tl.sum(weight, 0)
        acc = acc * faded + tl.sum(weight[:, None] * x, 0)
        most = now
    result = acc / tl.where(total == 0.0, 1.0, total)
    out_at = out + (t0 + first + token).to(tl.int64) * out_stride_t + head * out_stride_h + dv
    tl.store(out_at, result.to(out.dtype.element_ty), mask=dv < D_V)
