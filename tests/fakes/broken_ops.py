"""Ops that are wrong in one way each. Each class's docstring says how."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch

from octavo.core import ops as portable
from octavo.core.quantization.base import QuantizedTensor, rounded_rows
from octavo.plugins import Ops as Portable


class Ops(Portable):
    """Nothing is wrong."""


class WritesOneSlotMore(Ops):
    """The last row also goes to the slot behind its own."""

    def write_kv(self, handle: Any, k: Any, v: Any, meta: Any, group: int = 0) -> Any:
        handle = super().write_kv(handle, k, v, meta, group)
        last = int(meta.slots[group].max())
        for cache in handle:
            flat = cache.flatten(0, 1)
            if last + 1 < len(flat):
                flat[last + 1] = flat[last]
        return handle


class ClearsNewBlocks(Ops):
    """Right: what is cleared when a block's first slot is written belongs to no sequence."""

    def cleared(self, slots: torch.Tensor, size: int) -> torch.Tensor:
        return slots[slots % size == 0] // size

    def write_kv(self, handle: Any, k: Any, v: Any, meta: Any, group: int = 0) -> Any:
        slots = meta.slots[group]
        for cache in handle:
            cache[self.cleared(slots[slots >= 0], cache.shape[1])] = 0
        return super().write_kv(handle, k, v, meta, group)


class ClearsWrittenBlocks(ClearsNewBlocks):
    """Every block that is written to is cleared before."""

    def cleared(self, slots: torch.Tensor, size: int) -> torch.Tensor:
        return slots // size


class WritesPadding(Ops):
    """Slot -1 is the last slot, as indexing from the end has it."""

    def write_kv(self, handle: Any, k: Any, v: Any, meta: Any, group: int = 0) -> Any:
        for cache, new in zip(handle, (k, v), strict=True):
            cache.flatten(0, 1)[meta.slots[group]] = new.to(cache.dtype)
        return handle


class WritesForTheEffect(Ops):
    """The cache is written, and no handle comes back."""

    def write_kv(self, *given: Any, **options: Any) -> Any:
        super().write_kv(*given, **options)


class CopiesForTheEffect(Ops):
    """Blocks are copied, and no handles come back."""

    def copy_blocks(self, handles: Any, pairs: Any) -> Any:
        super().copy_blocks(handles, pairs)


class IgnoresWindow(Ops):
    """Every position is seen."""

    def paged_attention(self, q: Any, handle: Any, meta: Any, **options: Any) -> Any:
        return super().paged_attention(q, handle, meta, **{**options, "window": 0})


class KeepsEightBits(Ops):
    """Right: its cache holds 8-bit floats, as values of float32."""

    def kv_block_bytes(self, spec: Any, block_size: int) -> int:
        return super().kv_block_bytes(replace(spec, dtype="float32"), block_size)

    def alloc_kv(self, groups: Any, num_blocks: int, block_size: int) -> Any:
        wide = [replace(spec, dtype="float32") for spec in groups]
        return super().alloc_kv(wide, num_blocks, block_size)

    def write_kv(self, handle: Any, k: Any, v: Any, meta: Any, group: int = 0) -> Any:
        k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        return super().write_kv(handle, k, v, meta, group)


class KeepsEightBitsOfAll(KeepsEightBits, IgnoresWindow):
    """Windows are ignored besides."""


class IgnoresSoftcap(Ops):
    """Scores are not capped."""

    def paged_attention(self, q: Any, handle: Any, meta: Any, **options: Any) -> Any:
        return super().paged_attention(q, handle, meta, **{**options, "softcap": 0.0})


class IgnoresSinks(Ops):
    """The denominator has no sink."""

    def paged_attention(self, q: Any, handle: Any, meta: Any, **options: Any) -> Any:
        return super().paged_attention(q, handle, meta, **{**options, "sinks": None})


class HeadsInTurn(Ops):
    """Query head h reads KV head h modulo their number."""

    def paged_attention(self, q: Any, handle: Any, meta: Any, **options: Any) -> Any:
        kv_heads = handle[0].shape[2]
        group = q.shape[1] // kv_heads
        there = torch.arange(q.shape[1]).view(group, kv_heads).T.reshape(-1)
        sinks = options.get("sinks")
        if sinks is not None:
            options["sinks"] = sinks[there]
        out = super().paged_attention(q[:, there], handle, meta, **options)
        return out[:, there.argsort()]


class ReadsWhatIsNotWritten(Ops):
    """Masks the last block's unwritten slots by adding minus infinity to scores that are NaN."""

    def paged_attention(self, q: Any, handle: Any, meta: Any, **options: Any) -> Any:
        out = super().paged_attention(q, handle, meta, **options)
        size = handle[0].shape[1]
        starts = meta.batch.query_start
        for s in range(meta.batch.num_seqs):
            context = int(meta.batch.context_lens[s])
            last = int(meta.batch.block_tables[0][s, (context - 1) // size])
            unread = handle[1][last, (context - 1) % size + 1 :]
            out[int(starts[s]) : int(starts[s + 1])] += 0 * unread.sum()
        return out


class BlocksInOrder(Ops):
    """Takes a sequence's blocks to lie one behind the other."""

    def paged_attention(self, q: Any, handle: Any, meta: Any, **options: Any) -> Any:
        table = meta.block_tables[0]
        straight = (table[:, :1] + torch.arange(table.shape[1])).clamp(max=len(handle[0]) - 1)
        return super().paged_attention(
            q, handle, replace(meta, block_tables=(straight,)), **options
        )


class CopiesOneLayer(Ops):
    """Other layers' blocks stay as they were."""

    def copy_blocks(self, handles: Any, pairs: Any) -> Any:
        return [*super().copy_blocks(handles[:1], pairs), *handles[1:]]


class CopiesAtOnce(Ops):
    """Reads all sources before it writes any."""

    def copy_blocks(self, handles: Any, pairs: Any) -> Any:
        for handle in handles:
            for cache in handle:
                cache[[b for _, b in pairs]] = cache[[a for a, _ in pairs]]
        return handles


class ImportsNextDoor(Ops):
    """Blocks come in at the id after their own."""

    def import_blocks(self, src: Any, handles: Any, ids: Any) -> Any:
        last = len(handles[0][0]) - 1
        moved = ids if len(ids) > 4 else [min(i + 1, last) for i in ids]
        return super().import_blocks(src, handles, moved)


class CountsTooFewBytes(Ops):
    """Forgets the values."""

    def kv_block_bytes(self, spec: Any, block_size: int) -> int:
        return super().kv_block_bytes(spec, block_size) // 2


class MultipliesInHalf(Ops):
    """float32 weights, bfloat16 arithmetic."""

    def linear(self, x: Any, weight: Any, *, bias: Any = None, **rest: Any) -> Any:
        if isinstance(weight, QuantizedTensor):
            return super().linear(x, weight, bias=bias)
        out = (x.bfloat16() @ weight.bfloat16().T).to(x.dtype)
        return out if bias is None else out + bias


class DropsBias(Ops):
    """No bias."""

    def linear(self, x: Any, weight: Any, *, bias: Any = None, **rest: Any) -> Any:
        return super().linear(x, weight)


class DropsMinima(Ops):
    """int4 codes are scaled and not moved."""

    def linear(self, x: Any, weight: Any, *, bias: Any = None, **rest: Any) -> Any:
        if isinstance(weight, QuantizedTensor):
            weight = QuantizedTensor(
                weight.form, weight.codes, weight.scales, None, weight.group, weight.dtype
            )
        return super().linear(x, weight, bias=bias)


class QuantisesBesideKeptCodes(Ops):
    """Activations are quantised where they must not be."""

    def linear(self, x: Any, weight: Any, *, bias: Any = None, **rest: Any) -> Any:
        if isinstance(weight, QuantizedTensor) and weight.form in ("codes8", "codes4"):
            x = rounded_rows(x, weight.group).to(x.dtype)
        return super().linear(x, weight, bias=bias)


class NoHalf(Ops):
    """float16 is refused."""

    def linear(self, x: Any, weight: Any, *, bias: Any = None, **rest: Any) -> Any:
        if x.dtype == torch.float16:
            raise RuntimeError("no float16 kernel")
        return super().linear(x, weight, bias=bias)


class WrongRow(Ops):
    """The last row of an embedding is the first."""

    def embedding(self, ids: Any, weight: Any) -> Any:
        return super().embedding(ids % (len(getattr(weight, "codes", weight)) - 1), weight)


class TiesNothing(Ops):
    """The head tied to an embedding is a matrix of its own."""

    def tied_weight(self, packed: Any, spec: Any) -> Any:
        return torch.randn_like(packed)


class NormsWithoutEps(Ops):
    """eps is left out."""

    def rms_norm(self, x: Any, weight: Any, eps: float, *, offset: float = 0.0) -> Any:
        return super().rms_norm(x, weight, 0.0, offset=offset)


class DividesByAWord(Ops):
    """Calls a library with what that cannot take."""

    def rms_norm(self, x: Any, weight: Any, eps: float, *, offset: float = 0.0) -> Any:
        return torch.div(x, "rms")


class NormsWithoutTheSum(Ops):
    """Gives back the residual as it came."""

    def add_rms_norm(
        self, x: Any, residual: Any, weight: Any, eps: float, *, offset: float = 0.0
    ) -> Any:
        return super().add_rms_norm(x, residual, weight, eps, offset=offset)[0], residual


def as_if_whole(x: torch.Tensor) -> torch.Tensor:
    """The numbers that lie where those of a contiguous tensor would."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


class NormsAsIfWhole(Ops):
    """Rows are taken to lie one behind the other."""

    def rms_norm(self, x: Any, weight: Any, eps: float, *, offset: float = 0.0) -> Any:
        return super().rms_norm(as_if_whole(x), weight, eps, offset=offset)


class AddsAsIfWhole(Ops):
    """The residual's rows are taken to lie one behind the other."""

    def add_rms_norm(self, x: Any, residual: Any, *rest: Any, **options: Any) -> Any:
        return super().add_rms_norm(x, as_if_whole(residual), *rest, **options)


class AddsBesideItsRows(Ops):
    """The sum goes where the residual was, and one number further."""

    def add_rms_norm(self, x: Any, residual: Any, *rest: Any, **options: Any) -> Any:
        normed, total = super().add_rms_norm(x, residual, *rest, **options)
        rows, size = residual.shape
        if residual.stride(0) > size:
            residual.as_strided((rows, size + 1), residual.stride())[:, size] = 0
        return normed, total


class ActivatesAsIfWhole(Ops):
    """Rows are taken to lie one behind the other, for one of the kinds."""

    def act_and_mul(self, x: Any, kind: Any) -> Any:
        return super().act_and_mul(as_if_whole(x) if kind == "silu" else x, kind)


class EncodesAsIfWhole(Ops):
    """Rows are taken to lie one behind the other."""

    def layer_norm(self, x: Any, *rest: Any) -> Any:
        return super().layer_norm(as_if_whole(x), *rest)

    def activation(self, x: Any, kind: Any) -> Any:
        return super().activation(as_if_whole(x), kind)


class TurnsHalves(Ops):
    """Interleaved pairs are turned as halves."""

    def rotary(self, q: Any, k: Any, table: Any, meta: Any, *, interleaved: bool = False) -> Any:
        return super().rotary(q, k, table, meta)


class OneGelu(Ops):
    """The tanh of gelu_tanh stands for gelu too."""

    def act_and_mul(self, x: Any, kind: Any) -> Any:
        return super().act_and_mul(x, "gelu_tanh" if kind == "gelu" else kind)


class ActivatesInDouble(Ops):
    """The numbers are right, and not in x's dtype."""

    def act_and_mul(self, x: Any, kind: Any) -> Any:
        return super().act_and_mul(x, kind).double()


class ActivatesNothing(Ops):
    """Nothing comes back."""

    def act_and_mul(self, x: Any, kind: Any) -> Any:
        super().act_and_mul(x, kind)


class DrawsAnew(Ops):
    """Draws by torch's own dice."""

    def sample(self, logits: Any, rows: Any) -> Any:
        if rows.all_greedy:
            return super().sample(logits, rows)
        rows = replace(rows, seed=torch.randint(1 << 30, rows.seed.shape))
        return super().sample(logits, rows)


class DrawsAlways(Ops):
    """A row of NaN gives a token all the same."""

    def sample(self, logits: Any, rows: Any) -> Any:
        return super().sample(logits.nan_to_num(nan=-1e9, neginf=-1e9), rows)


class ForgetsTopP(Ops):
    """top-p is off."""

    def sample(self, logits: Any, rows: Any) -> Any:
        return super().sample(logits, replace(rows, top_p=torch.ones_like(rows.top_p)))


class KeepsAllTies(Ops):
    """top-p keeps all tokens that tie with the last one that it needs."""

    def sample(self, logits: Any, rows: Any) -> Any:
        logits = logits.clone()
        options = [t.tolist() for t in (rows.top_k, rows.top_p, rows.temperature)]
        for row, k, p, heat in zip(logits, *options, strict=True):
            if heat > 0 and p < 1:
                kept = portable.filter_row(row / heat, k, p, 0.0)
                row[row < row[kept > -math.inf].min()] = -math.inf
        return super().sample(logits, replace(rows, top_p=torch.ones_like(rows.top_p)))


class MasksFirstRows(Ops):
    """The first rows are masked, whichever are named."""

    def mask_logits(self, logits: Any, rows: Any, words: Any) -> None:
        super().mask_logits(logits, torch.arange(len(rows)), words)


class MasksWholeWords(Ops):
    """A last word that is not full is left out."""

    def mask_logits(self, logits: Any, rows: Any, words: Any) -> None:
        whole = logits.shape[1] // 32
        part = logits[:, : 32 * whole].clone()
        super().mask_logits(part, rows, words[:, :whole])
        logits[:, : 32 * whole] = part


class MasksFromTheLargestBit(Ops):
    """Bit 31 of a word stands for its first token."""

    def mask_logits(self, logits: Any, rows: Any, words: Any) -> None:
        bits = words[:, :, None] >> torch.arange(31, -1, -1, dtype=torch.int32)
        keep = (bits & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits[rows] = logits[rows].masked_fill(~keep, -math.inf)


class AllowsFirstRows(Ops):
    """The first rows are looked at, whichever are named."""

    def best_allowed(self, logits: Any, rows: Any, words: Any) -> Any:
        return super().best_allowed(logits, torch.arange(len(rows)), words)


class AllowsAll(Ops):
    """The best token of all, whatever is allowed."""

    def best_allowed(self, logits: Any, rows: Any, words: Any) -> Any:
        return super().best_allowed(logits, rows, torch.full_like(words, -1))


class AllowsByMasking(Ops):
    """The right token, and the logits of the others are gone."""

    def best_allowed(self, logits: Any, rows: Any, words: Any) -> Any:
        super().mask_logits(logits, rows, words)
        return super().best_allowed(logits, rows, words)


class RanksFromZero(Ops):
    """The most likely token has rank 0."""

    def token_logprobs(self, logits: Any, ids: Any) -> Any:
        chosen, rank, norm = super().token_logprobs(logits, ids)
        return chosen, rank - 1, norm


class LogprobsInTwos(Ops):
    """Logarithms to base 2."""

    def token_logprobs(self, logits: Any, ids: Any) -> Any:
        chosen, rank, norm = super().token_logprobs(logits, ids)
        return chosen / 0.6931472, rank, norm


class StoresTooMuch(Ops):
    """Keeps packed weights, and takes any number of bytes for one."""

    def packed_key(self) -> str:
        return "sound/1"

    def store_packed(self, packed: Any, spec: Any) -> Any:
        return packed.contiguous().view(torch.uint8).flatten()

    def load_packed(self, data: Any, spec: Any, dtype: str) -> Any:
        rows = data.view(torch.float32)
        return rows[: len(rows) // spec.shape[1] * spec.shape[1]].view(-1, spec.shape[1])

    def pack_weight(self, parts: Any, spec: Any, dtype: str) -> Any:
        packed = super().pack_weight(parts, spec, dtype)
        return packed


class _Gone:
    """A handle that was consumed."""

    def __init__(self, pair: Any) -> None:
        self.pair = pair

    def take(self) -> Any:
        pair, self.pair = self.pair, None
        assert pair is not None, "a handle was used after an operation had consumed it"
        return pair


class Donating(Ops):
    """Right: every operation that writes consumes its handles."""

    def alloc_kv(self, groups: Any, num_blocks: int, block_size: int) -> Any:
        return [_Gone(pair) for pair in super().alloc_kv(groups, num_blocks, block_size)]

    def write_kv(self, handle: Any, k: Any, v: Any, meta: Any, group: int = 0) -> Any:
        pair = tuple(cache.clone() for cache in handle.take())
        return _Gone(super().write_kv(pair, k, v, meta, group))

    def copy_blocks(self, handles: Any, pairs: Any) -> Any:
        return [_Gone(p) for p in super().copy_blocks([h.take() for h in handles], pairs)]

    def import_blocks(self, src: Any, handles: Any, ids: Any) -> Any:
        return [_Gone(p) for p in super().import_blocks(src, [h.take() for h in handles], ids)]

    def export_blocks(self, handles: Any, ids: Any) -> Any:
        assert all(h.pair is not None for h in handles), "a consumed handle was read"
        return super().export_blocks([h.pair for h in handles], ids)

    def paged_attention(self, q: Any, handle: Any, meta: Any, **options: Any) -> Any:
        assert handle.pair is not None, "a consumed handle was read"
        return super().paged_attention(q, handle.pair, meta, **options)


class EncodesCausally(Ops):
    """Positions do not see those behind them."""

    def encoder_attention(self, q: Any, k: Any, v: Any, meta: Any, *, scale: float) -> Any:
        out = torch.zeros_like(q)
        starts = meta.batch.query_start.tolist()
        for a, b in itertools.pairwise(starts):
            if a < b:
                heads = (x[a:b].transpose(0, 1) for x in (q, k, v))
                out[a:b] = torch.nn.functional.scaled_dot_product_attention(
                    *heads, is_causal=True, scale=scale, enable_gqa=True
                ).transpose(0, 1)
        return out


class EncodesHeadsInTurn(Ops):
    """Query head h reads KV head h modulo their number."""

    def encoder_attention(self, q: Any, k: Any, v: Any, meta: Any, *, scale: float) -> Any:
        turns = (1, q.shape[1] // k.shape[1], 1)
        return super().encoder_attention(q, k.repeat(turns), v.repeat(turns), meta, scale=scale)


class NormsWithoutBias(Ops):
    """The bias is left out."""

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float) -> Any:
        return super().layer_norm(x, weight, torch.zeros_like(bias), eps)


class NormsByTheWrongVariance(Ops):
    """Of n numbers the variance has n - 1 in its denominator."""

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float) -> Any:
        away = x - x.mean(-1, keepdim=True)
        return away / (x.var(-1, keepdim=True) + eps).sqrt() * weight + bias


class ActivatesByOneGelu(Ops):
    """The one with tanh."""

    def activation(self, x: Any, kind: Any) -> Any:
        return super().activation(x, "gelu_tanh" if kind == "gelu" else kind)


class LetsNegativesPass(Ops):
    """relu of a number is the number."""

    def activation(self, x: Any, kind: Any) -> Any:
        return x if kind == "relu" else super().activation(x, kind)


class InDouble(Ops):
    """Right: sums of float64, in whatever order, are the same when they have been rounded to float32."""

    def linear(self, x: Any, weight: Any, *, bias: Any = None, **options: Any) -> Any:
        wide = super().linear(x.double(), weight.double(), **options)
        return (wide if bias is None else wide + bias).float()

    def rms_norm(self, x: Any, weight: Any, eps: float, *, offset: float = 0.0) -> Any:
        return super().rms_norm(x.double(), weight, eps, offset=offset).float()

    def add_rms_norm(self, x: Any, residual: Any, weight: Any, eps: float, **options: Any) -> Any:
        total = residual + x
        return InDouble.rms_norm(self, total, weight, eps, **options), total

    def act_and_mul(self, x: Any, kind: Any) -> Any:
        return super().act_and_mul(x.double(), kind).float()

    def paged_attention(self, q: Any, handle: Any, meta: Any, **options: Any) -> Any:
        return super().paged_attention(q.double(), handle, meta, **options).float()

    def token_logprobs(self, logits: Any, ids: Any) -> Any:
        logprobs, ranks, norm = super().token_logprobs(logits.double(), ids)
        return logprobs.float(), ranks, norm.float()


class MultipliesByCompany(InDouble):
    """Some rows together are summed in the order that is fastest for them."""

    def linear(self, x: Any, weight: Any, **options: Any) -> Any:
        if len(x) == 1:
            return super().linear(x, weight, **options)
        return Portable.linear(self, x, weight, **options)


class NormsByCompany(InDouble):
    """Of many rows each has an eps of its own."""

    def rms_norm(self, x: Any, weight: Any, eps: float, *, offset: float = 0.0) -> Any:
        return super().rms_norm(x, weight, eps * len(x), offset=offset)


class AddsByCompany(InDouble):
    """Of many rows each has an eps of its own."""

    def add_rms_norm(self, x: Any, residual: Any, weight: Any, eps: float, **options: Any) -> Any:
        return super().add_rms_norm(x, residual, weight, eps * len(x), **options)


class AttendsByCompany(InDouble):
    """Several sequences together are summed in the order that is fastest for them."""

    def paged_attention(self, q: Any, handle: Any, meta: Any, **options: Any) -> Any:
        if len(meta.batch.context_lens) == 1:
            return super().paged_attention(q, handle, meta, **options)
        return Portable.paged_attention(self, q, handle, meta, **options)
