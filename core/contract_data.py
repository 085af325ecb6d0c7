"""The data of the backend contract: what a device is, what a model is, how one is driven on the other.

Imported from `octavo.core.contract`, or `octavo.plugins` by a plug-in. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from octavo.core.types import Batch

if TYPE_CHECKING:
    import torch

Handle = Any
"""A layer's KV cache as its backend keeps it. The core passes it around and never looks inside."""

Inputs = Any
"""What `Backend.prepare` made of a batch; opaque to the core and the ops' `meta`."""

PackedWeight = Any
"""A weight in the layout its backend chose in `Ops.pack_weight`."""


# ------------------------------------------------------------------------------- what a device is


@dataclass(frozen=True, slots=True)
class Probe:
    """What `Backend.probe` found. `devices` is empty when there are none, and `reason` says why.

    details: facts for `octavo devices`, as the chip's name.
    """

    devices: tuple[str, ...] = ()
    reason: str = ""
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of device memory. total: all of it. free: what this process could still take."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do, in data. A feature that is missing is a row here, never an exception
    in the middle of a request: the core falls back to the portable op or refuses at start-up.

    dtypes: of float weights. kv_dtypes: of the KV cache. block_sizes: tokens that a KV block may hold.
    graph_capture: whether whole steps are replayed. swap: whether blocks can be moved to the host and
    back, as `--swap-space` wants it: refused without. collectives: those that ranks can run, by name.
    """

    dtypes: tuple[str, ...] = ("float32",)
    native_dtypes: tuple[str, ...] = ("float32",)  # those that are not slower than float32
    kv_dtypes: tuple[str, ...] = ("float32",)
    logits_dtype: str = ""  # of what "forward" returns, where it rounds more than the dtype does
    kv_follows_dtype: bool = (
        False  # a cache in the weights' dtype is the fastest: what "auto" means
    )
    kv_equals_dtype: bool = False  # the cache is in the weights' dtype: attention takes no other
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    head_sizes: tuple[int, int, int] = (1, 1024, 1)  # smallest, largest, multiple
    # "dynamic": any. "bucketed": those of the plan's lanes are best, and are run once at the start.
    # "static": nothing but the compiled programs runs on the device, at bucket shapes; what changes
    # logits, and log-probabilities, are computed on the host.
    shapes: Literal["dynamic", "bucketed", "static"] = "dynamic"
    graph_capture: bool = False
    swap: bool = False
    quantization: tuple[str, ...] = ()  # canonical forms that `pack_weight` and `linear` take
    # Forms of a checkpoint's own codes that `pack_weight` and `linear` take, with results as if they were float32
    # numbers: activations are not quantised.
    kept_codes: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    seeded_sampling: bool = True  # the device draws from (seed, output index, vocabulary id)
    batch_invariant: bool = False  # can give a row the same bits alone and in any batch
    # Whether models whose positions see those behind them, too, can run: `encoder_attention`, `layer_norm`
    # and `activation` work on what `prepare` returns, and that has `positions` [T].
    encoders: bool = False
    ops: Mapping[str, str] = field(
        default_factory=dict
    )  # op -> what runs it ("portable", "c++ avx512", …)
    notes: Mapping[str, str] = field(
        default_factory=dict
    )  # free-form facts for `octavo devices NAME`

    def refuses_head_size(self, head_size: int) -> bool:
        """Whether attention cannot run with heads of this size."""
        low, high, step = self.head_sizes
        return not (low <= head_size <= high and head_size % step == 0)


# --------------------------------------------------------------------------------- what a model is


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV cache of one layer group.

    layers: their indices. kv_heads: of each layer. head_size, head_size_v: numbers in a
    key and in a value. dtype: what they are kept in.
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
    """What `Backend.plan` may know of a model before any weight is read.

    architecture: its Hugging Face name. num_layers: decoder or encoder layers. hidden_size: of the residual stream.
    q_heads, kv_heads: of attention. head_size: numbers in a head. vocab_size: rows of logits are so
    wide. max_position: tokens of the longest context. num_parameters: all numbers of its weights. kv:
    its groups of layers with equal caches; an encoder has none.
    """

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
    """What the user asked for; None means the backend may choose.

    max_num_seqs: sequences that may run at once. max_model_len: tokens of the longest. max_num_batched_tokens:
    tokens of a step. block_size: tokens of a KV block. dtype: of float weights. kv_dtype: of the KV
    cache. threads: of the CPU. batch_invariant: whether a row's bits must not depend on its company.
    """

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
    """One kind of step, and the sizes of its batches. Empty bucket tuples mean that any size will do.

    kinds: what the lane takes. "decode": one token that is drawn from, of a sequence whose earlier
    tokens are computed. "prefill": everything else; also a single token, of a sequence that starts or
    that draws several samples. "mixed" (or both): anything, in one batch.
    max_seqs, max_tokens: what a batch may hold; the largest buckets bound it, too.
    chunk_multiple: a part of a prompt that is not its last has a multiple of so many tokens.
    token_buckets, seq_buckets, block_buckets, row_buckets: sizes to which T, S, the width of the block
    tables and the rows of logits are padded, rising. A sequence never has more blocks than the largest
    block bucket. With row buckets "forward" always returns logits [bucket, V], and "sample" is called
    with these as they are and with inputs padded by greedy rows; the core cuts what it returns.
    exclusive: whether the lane has a step for itself. Lanes that are not share steps: one batch each.
    Of the lanes that share a step at most one takes prompts and one decoding sequences.
    chunked: whether a prompt may be computed in parts. False, for attention that sees no earlier
    tokens: a prompt is computed whole in one step, none longer than the lane is taken, and the prefix
    cache is off. A sequence that was preempted after it outgrew the lane computes the rest token by
    token, as decode items of which only the last is drawn from.
    """

    kinds: tuple[Literal["prefill", "decode", "mixed"], ...] = ("mixed",)
    max_seqs: int = 64
    max_tokens: int = 512
    chunk_multiple: int = 1
    token_buckets: tuple[int, ...] = ()
    seq_buckets: tuple[int, ...] = ()
    block_buckets: tuple[int, ...] = ()
    exclusive: bool = False
    row_buckets: tuple[int, ...] = ()
    chunked: bool = True


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How a backend wants to be driven. The core validates it, records it and obeys it.

    block_size: tokens of a KV block. lanes: kinds of batches. dtype, kv_dtype: those of the limits. layout:
    a process for each rank, or one program over all. world_size: ranks.
    """

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
    stacked along the output dimension; each has its own shape.

    name: its key in `Ctx.weights`. role: what it is multiplied, added or looked up as.
    """

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
        """Of the parts stacked."""
        first = self.parts[0][1]
        return (sum(shape[0] for _, shape in self.parts), *first[1:])


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer that may run as one fused op: norm, attention with rotary positions, norm, gated
    feed-forward, the results of both halves added to the residual stream. Weights go by name.

    hidden: width of the residual stream. intermediate: of the feed-forward. q_heads, kv_heads: of attention.
    head_size: numbers in a head. norm_1, norm_2: names of the norms before attention and before the
    feed-forward. qkv, out: names of attention's products. gate_up, down: names of the feed-forward's.
    qkv_bias, out_bias, gate_up_bias, down_bias: names of what is added to these, None where nothing is.
    rotary: name of the table of cosines and sines. interleaved: whether pairs of neighbours are rotated,
    and not the halves of a head. eps: of both norms. norm_offset: what is added to the norms' weights. act: on the gate.
    scale: of scores. window: positions that a query sees, 0 for all. softcap: bound of scores, 0 for none.
    group: KV group of the layer.
    """

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
class DecoderSpec:
    """A whole decoder that may run as one fused op, from token ids to logits. Weights go by name.

    layers: all, in order, as `Ops.decoder_layers` takes them. embedding: whose rows the ids name. norm: the
    one behind the layers. head: what the norm's result is multiplied with. eps: of the norm. norm_offset: what
    is added to its weights.
    """

    layers: tuple[LayerSpec, ...]
    embedding: str
    norm: str
    head: str
    eps: float = 1e-6
    norm_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Ctx:
    """All that a layer may use inside a step, passed down explicitly.

    weights: packed, by name. kv: layer i's handle at i, replaced by the one an op returns. meta: what
    `Backend.prepare` made of the batch. logits_only: nothing reads what the last layer makes of rows whose
    logits are not wanted, so `Ops.decoder_layers` may leave it out.
    """

    weights: Mapping[str, PackedWeight]
    kv: list[Handle]
    meta: Inputs
    logits_only: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """A pure function the shared runner will call every step, offered to `Backend.compile`.

    kind: "forward", "embed" or "sample". model: the model whose step it is. example: None so far.
    forward: fn(weights, kv, inputs) -> (StepOut, kv).
    embed:   the same for steps in which prompts are embedded, with hidden states in the StepOut.
    sample:  fn(logits [L, V], SampleInputs) -> tokens [L] int64. Logits are float32, unless the device's
             shapes are static: then they are what "forward" returned, and `fn` widens them.
    The set of kinds is open: a backend returns `fn` as it is for one it does not know.

    What `compile` returns may have an attribute `compilations`, how many programs it has built so far:
    it is told in the engine's statistics, and must not grow after the start.
    """

    kind: str
    fn: Callable[..., Any]
    model: Any = None
    example: Any = None
    groups: int = 1  # KV groups of the model

    def example_batches(self, plan: ExecutionPlan) -> Iterator[Batch]:
        """One batch of padding for each combination of buckets that a step of the plan's lanes can need,
        as the core will run them at the start when `Capabilities.shapes` is not "dynamic"."""
        from octavo.core.warm_up import example_batches

        return example_batches(plan.lanes, self.groups)


@dataclass(slots=True)
class StepOut:
    """Device-side results of a forward pass. `logits` [L, V], float32, bfloat16 or float16, belong to
    `Batch.logits_rows`; they must hold until the other lanes of the step have run, too.

    hidden: the last hidden states [T, hidden], of "embed". pooled, tokens: of programs that pool
    or draw themselves. All None from a model's own "forward".
    """

    logits: Any
    hidden: Any = None
    pooled: Any = None
    tokens: Any = None


class Transfer(Protocol):
    """A copy of KV blocks to the host that is under way. Its blocks are not written until it is done."""

    def done(self) -> bool:
        """Whether it has ended; does not wait."""
        ...

    def wait(self) -> torch.Tensor:
        """The blocks [count, bytes] of uint8 on the host, once they are there."""
        ...


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """Per row of logits, device tensors: what `Ops.sample` draws by. [L] each.

    all_greedy: whether every temperature is 0, known on the host.
    """

    temperature: Any  # float32; 0: greedy
    top_k: Any  # int32; 0: off
    top_p: Any  # float32; 1: off
    min_p: Any  # float32; 0: off
    seed: Any  # int64, the bits of an unsigned seed
    counter: Any  # int64, index of the output token
    all_greedy: bool = False
