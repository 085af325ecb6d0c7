"""Packed weights, products with them, and decoder layers in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from octavo.core import huge_pages
from octavo.kernels.cpu.library import (
    BF16,
    CODES4,
    CODES8,
    F16,
    F32,
    INT4,
    INT8,
    address,
    dtype_code,
    fail,
    host,
    lib,
)

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.cpu.library import HostArray
    from octavo.kernels.cpu.steps import AttentionLayer, AttentionStep, WriteStep

FORMATS: Final = {
    "float32": F32,
    "bfloat16": BF16,
    "float16": F16,
    "int8": INT8,
    "int4": INT4,
    "codes8": CODES8,
    "codes4": CODES4,
}
GROUPED: Final = ("int4", "codes8", "codes4")
CODES: Final = ("codes8", "codes4")
GROUP: Final = 32  # inputs that share a scale in those, unless asked otherwise
PACKING: Final = 1  # counts changes of the packed layouts: bytes of another number are not read
_ALIGNMENT: Final = 64


class _Weight(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("gated", ctypes.c_int32),
    )


class PackedWeight:
    """A weight [n, k] in the layout of the instruction set in use, in one buffer.

    format: float32, bfloat16, float16, int8 (a scale per output), int4 (a scale and a minimum per output and
    `group` inputs); or codes4 and codes8, which only codes can fill: products with them are those with the
    float32 numbers that they stand for. gated: the first half of the outputs are gate rows, the second the up
    rows that belong to them.
    """

    __slots__ = ("address", "buffer", "format", "gated", "group", "k", "n", "struct")

    def __init__(
        self, n: int, k: int, format: str, *, group: int = GROUP, gated: bool = False
    ) -> None:
        """An empty one, to be filled by :meth:`pack` or by reading its `buffer`.

        Raises:
            ValueError: the format cannot hold such a weight.
        """
        self.n, self.k, self.format, self.group, self.gated = n, k, format, group, gated
        self.struct = _Weight(None, n, k, FORMATS[format], group, gated)
        self.address = ctypes.addressof(self.struct)
        self.buffer: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the packed form takes."""
        size = int(lib.weight_bytes(self.address))
        if size < 0:
            raise ValueError(
                f"a weight of {self.n} x {self.k} cannot be packed as {self.format}"
                + (f" in groups of {self.group}" if self.format in GROUPED else "")
            )
        return size

    def place(self, buffer: Tensor) -> None:
        """Uses `buffer` uint8 [nbytes], 64-byte aligned, as the packed form."""
        if buffer.numel() != self.nbytes or buffer.data_ptr() % _ALIGNMENT:
            raise ValueError(f"a packed weight takes {self.nbytes} bytes at a multiple of 64")
        self.buffer = buffer
        self.struct.data = buffer.data_ptr()

    def copy(self, packed: Tensor) -> None:
        """The same from a copy of those bytes, wherever they lie."""
        if packed.numel() != self.nbytes:
            raise ValueError(f"a packed weight takes {self.nbytes} bytes, not {packed.numel()}")
        self._allocate()
        assert self.buffer is not None
        self.buffer.copy_(packed)

    def pack(self, parts: Sequence[Tensor]) -> PackedWeight:
        """Fills it from tensors [rows, k] of one float dtype, stacked to n rows; returns itself.

        Raises:
            ValueError: they do not make up the weight, or its format is of codes alone.
        """
        rows = [part.shape[0] for part in parts]
        if sum(rows) != self.n or any(part.shape[1] != self.k for part in parts):
            raise ValueError(
                f"parts {[tuple(p.shape) for p in parts]} do not make {self.n} x {self.k}"
            )
        if self.format in CODES:
            raise ValueError(f"{self.format} takes codes that are there already: use pack_codes")
        parts = [part.contiguous() for part in parts]
        self._allocate()
        status = lib.pack_weight(
            self.address,
            (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts)),
            (ctypes.c_int64 * len(parts))(*rows),
            dtype_code(parts[0].dtype),
        )
        if status:
            fail(status, "pack_weight")
        return self

    def pack_codes(
        self, codes: Tensor, scales: Tensor, minima: Tensor | None = None
    ) -> PackedWeight:
        """Fills it from codes that are quantised already; returns itself.

        int8: codes int8 [n, k], scales float32 [n, 1]. int4, codes4: codes uint8 [n, k] in [0, 15], scales
        and minima float16 [n, k / group]. codes8: codes int8 [n, k], scales float16 [n, k / group].
        Value = code · scale + minimum.

        Raises:
            ValueError: tensors of other shapes or dtypes.
        """
        import torch

        whole_rows = self.format == "int8"
        grid = (self.n, 1 if whole_rows else self.k // self.group)
        signed = self.format in ("int8", "codes8")
        want = (
            torch.int8 if signed else torch.uint8,
            torch.float32 if whole_rows else torch.float16,
            None if signed else torch.float16,
        )
        given = (codes.dtype, scales.dtype, None if minima is None else minima.dtype)
        shapes = [tuple(t.shape) for t in (scales, minima) if t is not None]
        if tuple(codes.shape) != (self.n, self.k) or given != want or set(shapes) != {grid}:
            raise ValueError(
                f"{self.format} codes of {self.n} x {self.k} are {want} with scales {grid}, not "
                f"{given} of {tuple(codes.shape)} with {shapes}"
            )
        whole = [None if t is None else t.contiguous() for t in (codes, scales, minima)]
        self._allocate()
        status = lib.pack_codes(self.address, *(None if t is None else t.data_ptr() for t in whole))
        if status:
            fail(status, "pack_codes")
        return self

    def _allocate(self) -> None:
        self.place(huge_pages.empty(self.nbytes))


def linear(out: Tensor, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> None:
    """out float32 [T, n] = x float32 [T, k] · weightᵀ + bias float32 [n].

    A row's bits do not depend on the other rows. Integer weights quantise x to symmetric codes in
    [-127, 127], by row and 64 inputs (int8) or the weight's group (int4), and add these up exactly.
    """
    status = lib.linear(
        weight.address,
        out.data_ptr(),
        out.stride(0),
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        None if bias is None else bias.data_ptr(),
    )
    if status:
        fail(status, "linear")


def unpack_rows(out: Tensor, weight: PackedWeight, rows: HostArray) -> None:
    """out float32 [T, k] = the rows `rows` int64 [T] of a packed weight: an embedding's lookup."""
    status = lib.unpack_rows(weight.address, out.data_ptr(), address(rows), len(rows))
    if status:
        fail(status, "unpack_rows")


class DecoderLayer(ctypes.Structure):
    """Everything :func:`decoder_layers` needs that one layer never changes."""

    _fields_ = (
        ("norm_1", ctypes.c_void_p),
        ("norm_2", ctypes.c_void_p),
        ("qkv", _Weight),
        ("out", _Weight),
        ("gate_up", _Weight),
        ("down", _Weight),
        ("qkv_bias", ctypes.c_void_p),
        ("out_bias", ctypes.c_void_p),
        ("gate_up_bias", ctypes.c_void_p),
        ("down_bias", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("norm_offset", ctypes.c_float),
        ("rotary_dim", ctypes.c_int32),
        ("rotary_style", ctypes.c_int32),
        ("act", ctypes.c_int32),
    )

    def __init__(
        self,
        *,
        norms: tuple[Tensor, Tensor],
        weights: tuple[PackedWeight, PackedWeight, PackedWeight, PackedWeight],
        biases: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
        cos_sin: Tensor,
        attention: AttentionLayer,
        caches: tuple[Tensor, Tensor],
        eps: float,
        norm_offset: float,
        rotary_style: int,
        act: int,
    ) -> None:
        """norms float32 [hidden]: before attention, before the feed-forward; weights and float32
        biases: QKV, attention's output, gate and up (gated), down; cos_sin float32 [positions,
        rotary_dim]; caches: the layer's K and V.
        """
        super().__init__(
            *(norm.data_ptr() for norm in norms),
            *(weight.struct for weight in weights),
            *(None if bias is None else bias.data_ptr() for bias in biases),
            cos_sin.data_ptr(),
            attention.sinks,
            attention.scale,
            attention.softcap,
            attention.window,
            *(cache.data_ptr() for cache in caches),
            eps,
            norm_offset,
            cos_sin.shape[1],
            rotary_style,
            act,
        )
        self.keep = (norms, weights, biases, cos_sin, attention, caches)
        self.address = ctypes.addressof(self)


class LayerStep(ctypes.Structure):
    """Everything :func:`decoder_layers` needs that is the same for all layers of a step. It is filled
    again for each step: making it anew would take as long as a layer of one row."""

    _fields_ = (
        ("attention", ctypes.c_void_p),
        ("write", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("tails", ctypes.c_void_p),
    )

    def __init__(self, attention: AttentionStep, write: WriteStep, positions: HostArray) -> None:
        """q, k and v are columns of one buffer: its row stride is what both steps must say.
        positions int64 [T], negative for padding."""
        super().__init__(
            attention.address,
            write.address,
            host(positions, "positions", "int64", 1),
            len(positions),
            None,
        )
        self.attention_step, self.write_step, self.keep = attention, write, positions
        self.address = ctypes.addressof(self)

    def fill(
        self,
        block_tables: HostArray,
        query_start: HostArray,
        context_lens: HostArray,
        slots: HostArray,
        positions: HostArray,
    ) -> None:
        """Takes another step's arrays."""
        self.attention_step.fill(block_tables, query_start, context_lens)
        self.write_step.fill(slots)
        self.positions = host(positions, "positions", "int64", 1)
        self.rows = len(positions)
        self.keep = positions
        self.keep_tails(None)

    def keep_tails(self, tails: HostArray | None) -> None:
        """tails int32 [S]: how many last rows of each sequence are wanted of the last layer; the others of x are
        undefined after it. None: all are wanted, as after `fill`.

        Raises:
            ValueError: not a number for each sequence. One that is larger than its sequence is refused when the
                layers run.
        """
        sequences = self.attention_step.sequences
        if tails is not None and len(tails) != sequences:
            raise ValueError(f"{sequences} sequences need as many tails, not {len(tails)}")
        self.tails = None if tails is None else host(tails, "tails", "int32", 1)
        self.tails_array = tails


class LayerStack:
    """Layers that run in order, each with the step that belongs to it, and what C reads of both."""

    def __init__(self, layers: Sequence[DecoderLayer], steps: Sequence[LayerStep]) -> None:
        self.keep = (layers, steps)
        self.count = len(layers)
        self.layers = (ctypes.c_void_p * self.count)(*(layer.address for layer in layers))
        self.steps = (ctypes.c_void_p * self.count)(*(step.address for step in steps))


def decoder_layers(stack: LayerStack, x: Tensor) -> None:
    """x float32 [T, hidden] contiguous: by each layer += attention(norm(x)), then += feed-forward(norm(x)).

    Gives the same bits as the single ops.
    """
    status = lib.decoder_layers(stack.layers, stack.steps, stack.count, x.data_ptr())
    if status:
        fail(status, "decoder_layers")


class DecoderEnds(ctypes.Structure):
    """What :func:`decoder_logits` needs of a model before its layers and behind them."""

    _fields_ = (
        ("embedding", _Weight),
        ("head", _Weight),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("norm_offset", ctypes.c_float),
    )

    def __init__(
        self,
        embedding: PackedWeight,
        head: PackedWeight,
        norm: Tensor,
        eps: float,
        norm_offset: float,
    ) -> None:
        """embedding [V, hidden]; head [V, hidden], which may be the same; norm float32 [hidden]."""
        super().__init__(embedding.struct, head.struct, norm.data_ptr(), eps, norm_offset)
        self.keep = (embedding, head, norm)
        self.address = ctypes.addressof(self)


def decoder_logits(
    out: Tensor,
    stack: LayerStack,
    ends: DecoderEnds,
    ids: HostArray,
    logits_rows: HostArray | None,
) -> None:
    """out float32 [L, V] = the logits of rows logits_rows int64 [L] (None: all, in order) of tokens ids int64 [T]:
    embedding, the stack's layers, norm and head.

    Gives the same bits as the single ops.
    """
    status = lib.decoder_logits(
        stack.layers,
        stack.steps,
        stack.count,
        ends.address,
        address(ids),
        None if logits_rows is None else address(logits_rows),
        out.shape[0],
        out.data_ptr(),
        out.stride(0),
    )
    if status:
        fail(status, "decoder_logits")
