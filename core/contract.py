"""The seam between the engine and a hardware backend. Version 1.0.

A backend is one class with working defaults: give it a `name`, `device_types`, `probe` and a torch
device and it serves through the portable ops of `octavo.core.ops`; each further method makes it
faster. Importing this module imports no torch: the portable bodies are loaded when first called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from octavo.core.types import Batch

if TYPE_CHECKING:
    import torch

    from octavo.core import ops as portable
    from octavo.core.instruments import Instruments
    from octavo.core.quantization.base import QuantizedTensor

else:

    class _Portable:
        """`octavo.core.ops`, imported (and torch with it) when first used."""

        def __getattr__(self, name):
            from octavo.core import ops

            return getattr(ops, name)

    portable = _Portable()

API_VERSION = (1, 0)
"""(major, minor) of this contract. A plug-in of another major is refused; a newer minor warns."""

Handle = Any
"""A layer's KV cache as its backend keeps it. The core passes it around and never looks inside."""

Inputs = Any
"""What `Backend.prepare` made of a batch; opaque to the core and the ops' `meta`."""

PackedWeight = Any
"""A weight in the layout its backend chose in `Ops.pack_weight`."""


# ------------------------------------------------------------------------------- what a device is


@dataclass(frozen=True, slots=True)
class Probe:
    """What `Backend.probe` found. `devices` is empty when there are none, and `reason` says why."""

    devices: tuple[str, ...] = ()
    reason: str = ""
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of device memory: all of it, and what this process could still take."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do, in data. A feature that is missing is a row here, never an exception
    in the middle of a request: the core falls back to the portable op or refuses at start-up."""

    dtypes: tuple[str, ...] = ("float32",)
    native_dtypes: tuple[str, ...] = ("float32",)  # those that are not slower than float32
    kv_dtypes: tuple[str, ...] = ("float32",)
    kv_follows_dtype: bool = (
        False  # a cache in the weights' dtype is the fastest: what "auto" means
    )
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    head_sizes: tuple[int, int, int] = (1, 1024, 1)  # smallest, largest, multiple
    shapes: Literal["dynamic", "bucketed", "static"] = "dynamic"
    graph_capture: bool = False
    swap: bool = False
    quantization: tuple[str, ...] = ()  # canonical forms that `pack_weight` and `linear` take
    collectives: tuple[str, ...] = ()
    seeded_sampling: bool = True  # the device draws from (seed, output index, vocabulary id)
    batch_invariant: bool = False  # can give a row the same bits alone and in any batch
    ops: Mapping[str, str] = field(
        default_factory=dict
    )  # op -> what runs it ("portable", "c++ avx512", …)
    notes: Mapping[str, str] = field(
        default_factory=dict
    )  # free-form facts for `octavo devices NAME`

    def refuses_head_size(self, head_size: int) -> bool:
        low, high, step = self.head_sizes
        return not (low <= head_size <= high and head_size % step == 0)


# --------------------------------------------------------------------------------- what a model is


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV cache of one layer group.

    `kind` is full or window(`window` last tokens matter). `latent` and `state` join with the first
    model that needs them.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str = "float32"
    kind: Literal["full", "window"] = "full"
    window: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What `Backend.plan` may know of a model before any weight is read."""

    architecture: str
    num_layers: int
    hidden_size: int
    q_heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    num_parameters: int
    kv: tuple[KVSpec, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user asked for; None means the backend may choose."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    dtype: str = "float32"
    kv_dtype: str = "float32"
    threads: int | None = None
    batch_invariant: bool = False
    op_providers: str = "none"  # none, auto (what was measured before), measure (now)


@dataclass(frozen=True, slots=True)
class Lane:
    """One kind of step. Empty bucket tuples mean that any size will do."""

    kinds: tuple[Literal["prefill", "decode", "mixed"], ...] = ("mixed",)
    max_seqs: int = 64
    max_tokens: int = 512
    chunk_multiple: int = 1
    token_buckets: tuple[int, ...] = ()
    seq_buckets: tuple[int, ...] = ()
    block_buckets: tuple[int, ...] = ()
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How a backend wants to be driven. The core validates it, records it and obeys it."""

    block_size: int
    lanes: tuple[Lane, ...]
    dtype: str
    kv_dtype: str
    layout: Literal["ranks", "spmd"] = "ranks"
    world_size: int = 1
    # Rows of logits a step may hold, more than there are sequences; prompt logprobs are chunked to it.
    max_logits_rows: int = 512


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """What a weight is for. `parts` name the checkpoint's tensors in the order in which they are
    stacked along the output dimension; each has its own shape."""

    name: str
    role: Literal["linear", "head", "embedding", "norm", "bias"]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    shard_axis: int | None = None  # logical axis that tensor parallelism may cut
    scheme: str | None = None  # canonical form of `octavo.core.quantization`; None: a float dtype
    group: int = 0  # inputs that share a scale in that form; 0: all of a row
    alias: str | None = None  # the weight this one is tied to
    gated: bool = False  # two equal parts, gate rows and up rows, that only `act_and_mul` reads

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0][1]
        return (sum(shape[0] for _, shape in self.parts), *first[1:])


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer that may run as one fused op: norm, attention with rotary positions, norm, gated
    feed-forward, the results of both halves added to the residual stream. Weights go by name."""

    layer: int  # index of the KV handle
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_size: int
    norm_1: str
    norm_2: str
    qkv: str
    out: str
    gate_up: str
    down: str
    qkv_bias: str | None = None
    out_bias: str | None = None
    gate_up_bias: str | None = None
    down_bias: str | None = None
    rotary: str = "rotary"
    interleaved: bool = False
    eps: float = 1e-6
    norm_offset: float = 0.0
    act: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    scale: float = 1.0
    window: int = 0
    softcap: float = 0.0
    group: int = 0


@dataclass(frozen=True, slots=True)
class Ctx:
    """All that a layer may use inside a step, passed down explicitly. `kv[i]` is layer i's handle,
    replaced by the one an op returns."""

    weights: Mapping[str, PackedWeight]
    kv: list[Handle]
    meta: Inputs


@dataclass(frozen=True, slots=True)
class Program:
    """A pure function the shared runner will call every step, offered to `Backend.compile`.

    forward: fn(weights, kv, inputs) -> (StepOut, kv).
    sample:  fn(logits [L, V] float32, SampleInputs) -> tokens [L] int64.
    The set of kinds is open: a backend returns `fn` as it is for one it does not know.
    """

    kind: str
    fn: Callable[..., Any]
    model: Any = None
    example: Any = None


@dataclass(slots=True)
class StepOut:
    """Device-side results of a forward pass. `logits` [L, V] belong to `Batch.logits_rows`."""

    logits: Any
    hidden: Any = None
    pooled: Any = None
    tokens: Any = None


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """Per row of logits, device tensors: what `Ops.sample` draws by. [L] each."""

    temperature: Any  # float32; 0: greedy
    top_k: Any  # int32; 0: off
    top_p: Any  # float32; 1: off
    min_p: Any  # float32; 0: off
    seed: Any  # int64, the bits of an unsigned seed
    counter: Any  # int64, index of the output token
    all_greedy: bool = False


# ------------------------------------------------------------------------------------------- ops


class Ops:
    """The operations of a step. Every method has a portable torch body in `octavo.core.ops`;
    overriding one is giving it a better kernel.

    q, k and v may be views with a row stride; `meta` is what the same backend's `prepare` returned.
    """

    device: str = "cpu"

    # Larger ops that this class offers: each with the smaller ones whose work it does. A subclass that
    # overrides one of those switches the fusion off, unless it names the fusion itself (`fuses`).
    fusions: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def fuses(self, name: str, spec: LayerSpec) -> bool:
        """Whether the larger op `name` should run `spec`: asked once, when a model is made."""
        return fusion_stands(type(self), name) and self.supports(name, spec)

    def supports(self, name: str, spec: LayerSpec) -> bool:
        """Whether this class's larger op `name` can run `spec`."""
        return False

    def decoder_layer(self, x: torch.Tensor, spec: LayerSpec, ctx: Ctx) -> torch.Tensor:
        """The residual stream x [T, hidden] after one layer; may work in place. Optional."""
        raise NotImplementedError("no decoder_layer: `supports` was not asked")

    # KV cache: one opaque handle per layer; an op returns the handle to use from now on.

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes that one block of one layer of the group takes."""
        return portable.kv_block_bytes(spec, block_size)

    def alloc_kv(self, groups: Sequence[KVSpec], num_blocks: int, block_size: int) -> list[Handle]:
        """One handle per layer, in layer order."""
        return portable.alloc_kv(self.device, groups, num_blocks, block_size)

    def write_kv(
        self, handle: Handle, k: torch.Tensor, v: torch.Tensor, meta: Inputs, group: int = 0
    ) -> Handle:
        """Stores k [T, Hkv, D] and v [T, Hkv, Dv] at `meta`'s slots; a slot of -1 is skipped."""
        return portable.write_kv(handle, k, v, meta, group)

    def copy_blocks(self, handles: list[Handle], pairs: Sequence[tuple[int, int]]) -> list[Handle]:
        """Copies block a to block b in every layer, for (a, b) in order."""
        return portable.copy_blocks(handles, pairs)

    def export_blocks(self, handles: list[Handle], ids: Sequence[int]) -> torch.Tensor:
        """The named blocks of all layers as one contiguous host tensor [len(ids), bytes] of uint8."""
        return portable.export_blocks(handles, ids)

    def import_blocks(
        self, src: torch.Tensor, handles: list[Handle], ids: Sequence[int]
    ) -> list[Handle]:
        """The inverse of `export_blocks`, into blocks `ids`."""
        return portable.import_blocks(src, handles, ids)

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

    # The rest of the layer.

    def pack_weight(
        self, parts: Mapping[str, torch.Tensor | QuantizedTensor], spec: WeightSpec, dtype: str
    ) -> PackedWeight:
        """Lays a weight out once, at load. `parts` are the checkpoint's tensors by `spec`'s names.

        With `spec.scheme`, which the device must offer (`Capabilities.quantization`), they are float
        numbers to quantise, or all of them codes of that form and group (`QuantizedTensor`).
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
        """x / rms(x) · (offset + weight) over the last dimension."""
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
        """(norm(residual + x), residual + x); may reuse both arguments' memory."""
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

    def sample(self, logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
        """logits [L, V] float32 -> tokens [L] int64.

        Per row: temperature, then top-k, top-p and min-p, then Gumbel-max with noise that depends on
        (seed, counter, vocabulary id) alone. -1 where no token is allowed or a logit is NaN.
        """
        return portable.sample(logits, rows)

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


# --------------------------------------------------------------------------------------- backend


class Backend:
    """A hardware family. Subclass it, name it, probe for devices; override what can be faster.

    name: the backend's own name; device_types: the words `--device` takes for it; priority: higher
    is tried first by `--device auto`; negative is never chosen by it.
    """

    name: str = ""
    device_types: tuple[str, ...] = ()
    api_version: tuple[int, int] = API_VERSION
    priority: int = 0

    def probe(self) -> Probe:
        """Which devices there are, or why none. Imports nothing heavy."""
        return Probe(reason=f"backend {self.name!r} does not implement probe()")

    def torch_device(self, device: str) -> str:
        """The torch device of a device word: the part behind the colon if there is one."""
        return device.partition(":")[2] or "cpu"

    def capabilities(self, device: str) -> Capabilities:
        """What `device` can do."""
        return Capabilities()

    def plan(self, model: ModelShape, device: str, limits: Limits) -> ExecutionPlan:
        """How to drive this model on this device. Pure: same arguments, same plan, no side effect."""
        return ExecutionPlan(
            block_size=limits.block_size or 16,
            lanes=(
                Lane(max_seqs=limits.max_num_seqs, max_tokens=limits.max_num_batched_tokens or 512),
            ),
            dtype=limits.dtype,
            kv_dtype=limits.kv_dtype,
            max_logits_rows=max(512, 2 * limits.max_num_seqs),
        )

    def memory(self, device: str) -> MemoryInfo:
        """Bytes in all and free, measured now."""
        from octavo.core import memory

        return memory.host_memory()

    def start(self, device: str, limits: Limits) -> None:
        """Called once in the process that will run the steps, before anything is allocated."""

    def ops(self, device: str) -> Ops:
        """The ops of one device."""
        ops = Ops()
        ops.device = self.torch_device(device)
        return ops

    def prepare(self, batch: Batch, prev: StepOut | None, device: str) -> Inputs:
        """Host arrays -> what the ops want, once per step and outside anything traced."""
        from octavo.core import ops

        return ops.prepare(batch, prev, self.torch_device(device))

    def compile(self, program: Program, plan: ExecutionPlan, device: str) -> Callable[..., Any]:
        """What the runner will call for this program; the default is the program's own function."""
        return program.fn

    def instruments(self, device: str) -> Instruments | None:
        """What `octavo bench` measures a device with, or None."""
        return None

    def communicator(self, group: Any) -> Communicator:
        """Sets up a process group. Collectives themselves are ops."""
        return Communicator()


class Communicator:
    """A group of ranks. The default is the group of one."""

    rank: int = 0
    size: int = 1

    def close(self) -> None:
        """Leaves the group."""
