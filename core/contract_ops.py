"""`Ops` of the backend contract: the operations of a step. Import it from `octavo.core.contract`, or
from `octavo.plugins` in a plug-in. Importing this module imports no torch: the portable bodies are
loaded when first called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from octavo.core.contract_data import (
    Ctx,
    DecoderSpec,
    Handle,
    Inputs,
    KVSpec,
    LayerSpec,
    PackedWeight,
    SampleInputs,
    Transfer,
    WeightSpec,
)

if TYPE_CHECKING:
    import torch

    from octavo.core import ops as portable
    from octavo.core.quantization.base import QuantizedTensor

else:

    class _Portable:
        """`octavo.core.ops`, imported (and torch with it) when first used."""

        def __getattr__(self, name):
            from octavo.core import ops

            return getattr(ops, name)

    portable = _Portable()


class Ops:
    """The operations of a step. Every method has a portable torch body in `octavo.core.ops`;
    overriding one is giving it a better kernel.

    device: the torch device that tensors live on.
    x, residual, q, k and v may be views of wider rows: their first stride may be larger than a row, and what
    lies between the rows must stay. Within a row they are contiguous, as all other tensors are.
    `meta` is what the same backend's `prepare` returned.
    """

    device: str = "cpu"

    # Larger ops that this class offers: each with the smaller ones whose work it does. A subclass that
    # overrides one of those switches the fusion off, unless it names the fusion itself (`fuses`).
    fusions: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    # Whether what `load_packed` returns goes on reading the bytes it was given. Where not, the core lets
    # the file go as it is read.
    keeps_packed: ClassVar[bool] = True

    # Whether `sample` gives -1 also where the largest logit is infinite, so that nobody looks at what it drew.
    draws_finite: ClassVar[bool] = False

    def fuses(self, name: str, spec: LayerSpec) -> bool:
        """Whether the larger op `name` should run `spec`: asked once, when a model is made."""
        return fusion_stands(type(self), name) and self.supports(name, spec)

    def supports(self, name: str, spec: LayerSpec) -> bool:
        """Whether this class's larger op `name` can run `spec`."""
        return False

    def decoder_layer(self, x: torch.Tensor, spec: LayerSpec, ctx: Ctx) -> torch.Tensor:
        """The residual stream x [T, hidden] after one layer; may work in place. Optional."""
        raise NotImplementedError("no decoder_layer: `supports` was not asked")

    def decoder_layers(self, x: torch.Tensor, specs: Sequence[LayerSpec], ctx: Ctx) -> torch.Tensor:
        """The same after all of a model's layers in order, for who offers this too. `specs` is the same object
        in every step. With `ctx.logits_only` the rows of the result may be anything that are not among the
        batch's `logits_rows`; what all rows write to the KV cache is still wanted. Optional."""
        raise NotImplementedError("no decoder_layers: `supports` was not asked")

    def decoder_logits(self, spec: DecoderSpec, ctx: Ctx) -> torch.Tensor:
        """Logits [L, V] float32 of the batch's `logits_rows` from its `token_ids`: embedding, all layers, norm and
        head, for who offers this too. `spec` is the same object in every step. Optional."""
        raise NotImplementedError("no decoder_logits: `supports` was not asked")

    # KV cache: one opaque handle per layer; an op returns the handle to use from now on. The one it was
    # given may be invalid then (donated to the device): the core never touches it again.

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes that one block of one layer of the group takes."""
        return portable.kv_block_bytes(spec, block_size)

    def alloc_kv(self, groups: Sequence[KVSpec], num_blocks: int, block_size: int) -> list[Handle]:
        """One handle per layer, in layer order."""
        return portable.alloc_kv(self.device, groups, num_blocks, block_size)

    def kv_lost(self, handles: list[Handle]) -> bool:
        """Asked after a step that failed: whether any of these handles, the newest that the core has, is
        no longer valid. Then `alloc_kv` is called anew and all that runs is computed again."""
        return False

    def write_kv(
        self, handle: Handle, k: torch.Tensor, v: torch.Tensor, meta: Inputs, group: int = 0
    ) -> Handle:
        """Stores k [T, Hkv, D] and v [T, Hkv, Dv] at `meta`'s slots; a slot of -1 is skipped."""
        return portable.write_kv(handle, k, v, meta, group)

    def copy_blocks(self, handles: list[Handle], pairs: Sequence[tuple[int, int]]) -> list[Handle]:
        """Copies block a to block b in every layer, for (a, b) in order."""
        return portable.copy_blocks(handles, pairs)

    def export_blocks(self, handles: list[Handle], ids: Sequence[int]) -> torch.Tensor | Transfer:
        """The named blocks of all layers as one contiguous host tensor [len(ids), bytes] of uint8, or a
        transfer that will have it: until that is done nothing writes the blocks."""
        return portable.export_blocks(handles, ids)

    def import_blocks(
        self, src: torch.Tensor, handles: list[Handle], ids: Sequence[int]
    ) -> list[Handle]:
        """The inverse of `export_blocks`, into blocks `ids`."""
        return portable.import_blocks(src, handles, ids)

    def drain(self) -> None:
        """Returns once the device reads no freed block any more: asked when nothing can run before
        blocks are there that `Backend.pins_frees` holds back."""

    # Attention.

    def paged_attention(
        self,
        q: torch.Tensor,
        handle: Handle,
        meta: Inputs,
        *,
        scale: float,
        group: int = 0,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, Hq, D] -> [T, Hq, Dv]. Causal; one call serves prefill, decode and mixed steps.

        window > 0: a query sees its last `window` positions, itself included. softcap c > 0: scores
        become c·tanh(score/c). sinks [Hq]: an extra logit in the softmax's denominator.
        """
        return portable.paged_attention(
            q, handle, meta, scale=scale, group=group, window=window, softcap=softcap, sinks=sinks
        )

    def encoder_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: Inputs, *, scale: float
    ) -> torch.Tensor:
        """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, Hq, Dv]: each position of a sequence sees all
        of them. The batch holds sequences from their first token to their last, and no KV cache is
        read or written. Rows of padding may be anything. Asked of devices with `Capabilities.encoders`.
        """
        return portable.encoder_attention(q, k, v, meta, scale=scale)

    # The rest of the layer.

    def pack_weight(
        self, parts: Mapping[str, torch.Tensor | QuantizedTensor], spec: WeightSpec, dtype: str
    ) -> PackedWeight:
        """Lays a weight out once, at load. `parts` are the checkpoint's tensors by `spec`'s names.

        With `spec.scheme`, which the device must offer (`Capabilities.quantization`), they are float
        numbers to quantise, or all of them codes of that form and group (`QuantizedTensor`). A scheme of
        `Capabilities.kept_codes` comes as codes alone.
        """
        return portable.pack_weight(self.device, parts, spec, dtype)

    def weight_bytes(self, spec: WeightSpec, dtype: str) -> int:
        """Bytes that `pack_weight` makes of such a weight; asked before it is read, too."""
        return portable.weight_bytes(spec, dtype)

    def packed_key(self) -> str | None:
        """Names the layout that `pack_weight` makes: whatever reads bytes packed under the same name
        computes the same with them. None: packed weights are not kept on disk."""
        return None

    def store_packed(self, packed: PackedWeight, spec: WeightSpec) -> torch.Tensor:
        """A packed weight's bytes on the host, uint8 [bytes]; asked where `packed_key` has a name."""
        raise NotImplementedError("no store_packed: `packed_key` was not asked")

    def load_packed(self, data: torch.Tensor, spec: WeightSpec, dtype: str) -> PackedWeight:
        """The packed weight of which `store_packed` gave these bytes, uint8 [bytes], often in a mapped
        file. They begin at a multiple of 64, stay as long as `data`, and must not be written to. Raises
        ValueError for a number of bytes that the weight does not have.
        """
        raise NotImplementedError("no load_packed: `packed_key` was not asked")

    def tied_weight(self, packed: PackedWeight, spec: WeightSpec) -> PackedWeight:
        """The weight `spec` (a head) made from the packed weight it is tied to (an embedding)."""
        return packed

    def embedding(self, ids: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """ids [T] -> [T, hidden]."""
        return portable.embedding(ids, weight)

    def linear(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        *,
        bias: PackedWeight | None = None,
        reduce: Literal["sum"] | None = None,
        lora: Any = None,
    ) -> torch.Tensor:
        """x [T, in] -> [T, out]. reduce="sum" adds the ranks' partial results."""
        return portable.linear(x, weight, bias=bias, reduce=reduce, lora=lora)

    def rms_norm(
        self, x: torch.Tensor, weight: PackedWeight, eps: float, *, offset: float = 0.0
    ) -> torch.Tensor:
        """x / rms(x) · (offset + weight) over the last dimension of x [T, n], or of heads [T, heads, n]."""
        return portable.rms_norm(x, weight, eps, offset=offset)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: PackedWeight,
        eps: float,
        *,
        offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(residual + x), residual + x) of x and residual [T, n]; may reuse both arguments' memory."""
        return portable.add_rms_norm(x, residual, weight, eps, offset=offset)

    def rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        meta: Inputs,
        *,
        interleaved: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates q [T, Hq, D] and k [T, Hkv, D] by their positions; may work in place.

        cos_sin [positions, R] float32 holds R/2 cosines and R/2 sines; the first R of D are rotated.
        """
        return portable.rotary(q, k, cos_sin, meta, interleaved=interleaved)

    def act_and_mul(
        self, x: torch.Tensor, kind: Literal["silu", "gelu", "gelu_tanh"]
    ) -> torch.Tensor:
        """x [T, 2n] -> act(x[:, :n]) · x[:, n:]."""
        return portable.act_and_mul(x, kind)

    def layer_norm(
        self, x: torch.Tensor, weight: PackedWeight, bias: PackedWeight, eps: float
    ) -> torch.Tensor:
        """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias over the last dimension of x [T, n]."""
        return portable.layer_norm(x, weight, bias, eps)

    def activation(
        self, x: torch.Tensor, kind: Literal["gelu", "gelu_tanh", "relu"]
    ) -> torch.Tensor:
        """The function of every number of x [T, n]."""
        return portable.activation(x, kind)

    def sample(self, logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
        """logits [L, V] float32 -> tokens [L] int64.

        Per row: temperature, then top-k, top-p and min-p, then Gumbel-max with noise that depends on
        (seed, counter, vocabulary id) alone. -1 where no token is allowed or a logit is NaN.
        """
        return portable.sample(logits, rows)

    def mask_logits(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
        """Sets logits [L, V] float32 of tokens that may not be drawn to minus infinity, in place.

        rows [R] int64: which rows; words [R, ceil(V / 32)] int32: bit v % 32 of word v // 32 stands
        for token v, 1 where it may be drawn.
        """
        portable.mask_logits(logits, rows, words)

    def best_allowed(
        self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor
    ) -> torch.Tensor:
        """The most likely token that may be drawn, of some rows: int64 [R], the lowest id on ties; -1 where
        that logit is not finite, there is none, or one is a NaN. `logits` [L, V] float32 stay as they are.

        rows [R] int64 and words [R, ceil(V / 32)] int32: as for `mask_logits`. Asked where logits are on
        the host.
        """
        return portable.best_allowed(logits, rows, words)

    def token_logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of raw logits [L, V] float32 and ids [L] int64: each id's log-softmax [L], its rank [L]
        (1 + how many tokens have a larger logit), and the row's logsumexp [L]."""
        return portable.token_logprobs(logits, ids)


def fusion_stands(cls: type[Ops], name: str) -> bool:
    """Whether class `cls` offers the larger op `name` and no class below the one that offers it has
    replaced a smaller op whose work it does."""
    for owner in cls.__mro__:
        offered = owner.__dict__.get("fusions", {})
        if name in offered:
            below = cls.__mro__[: cls.__mro__.index(owner)]
            return not any(op in sub.__dict__ for sub in below for op in offered[name])
    return False


def handle_of(op: str, found: Any) -> Any:
    """What an op returned in the place of the handle, or the list of them, that it was given.

    Raises:
        TypeError: nothing, as an op does that was written for its effect alone.
    """
    if found is None:
        word = "handle" if op == "write_kv" else "handles"
        raise TypeError(f"{op} returned None; it must return the {word}")
    return found
