"""CPU kernels: a C++ library behind a plain C ABI, called through ctypes.

The library holds the same kernels for several instruction sets and picks one at load. It owns no
threads: :func:`set_threads` lends it the OpenMP pool that torch already runs.

The functions here trust their arguments: a wrong shape or a freed tensor is undefined behaviour.
What holds for a whole step is prepared (and validated) once, as :class:`AttentionStep` and
:class:`WriteStep`; :mod:`octavo.kernels.cpu.checked` has the same functions with every argument
verified. Tensors are torch tensors on the CPU in float32, bfloat16 or float16, whose last dimension
is contiguous; importing this module imports no torch.

The KV cache of a layer is two tensors, laid out for the kernels (see :func:`kv_shapes`).
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    HostArray = Tensor | np.ndarray[Any, Any]

ABI: Final = 1
F32, BF16, F16 = 0, 1, 2
NEOX, INTERLEAVED = 0, 1
ACTIVATIONS: Final = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
BLOCK_MULTIPLE: Final = 16  # block sizes are multiples of this
HEAD_MULTIPLE: Final = 8  # head sizes are multiples of this

_P, _I, _I64, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "abi_version": (_I, []),
    "isa": (ctypes.c_char_p, []),
    "isas": (ctypes.c_char_p, []),
    "force_isa": (_I, [ctypes.c_char_p]),
    "set_threads": (None, [_P, _I]),
    "threads": (_I, []),
    "write_kv": (_I, [_P] * 5),
    "copy_blocks": (None, [_P, ctypes.c_size_t, _P, _I64]),
    "gather_blocks": (None, [_P, _P, ctypes.c_size_t, _P, _I64]),
    "scatter_blocks": (None, [_P, _P, ctypes.c_size_t, _P, _I64]),
    "paged_attention": (_I, [_P] * 6),
    "rms_norm": (_I, [_P] * 4),
    "add_rms_norm": (_I, [_P, _P, _P, _I64, _P, _P]),
    "rotary": (_I, [_P, _P, _P, _I, _P, _I64, _I, _I, _I, _I, _I64, _I64, _I, _I]),
    "act_and_mul": (_I, [_P, _P, _I64, _I64, _I64, _I64, _I, _I]),
    "sample": (_I, [_P, _P, _I64, _I64, _I64, _P, _P, _P, _P, _P, _P]),
    "token_logprobs": (_I, [_P, _P, _P, _P, _P, _I64, _I64, _I64]),
}


class _Library(Protocol):
    """What :func:`_load` gives: one attribute per C function, without the prefix."""

    def __getattr__(self, name: str) -> Any: ...


class _Functions:
    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"octavo_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class _Missing:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the CPU kernels are not available: {_why}")


def _load() -> tuple[_Library, str | None]:
    name = "liboctavo_cpu.so"
    # An editable install keeps the sources in the tree and the library beside the metadata; its
    # finder knows both, importlib.resources only the first.
    import importlib.resources

    try:
        with importlib.resources.as_file(importlib.resources.files(__name__) / name) as path:
            library = _Functions(path)
    except (OSError, AttributeError) as error:
        return _Missing(), f"{name} was not built or does not load ({error})"
    if library.abi_version() != ABI:
        return _Missing(), f"{name} has ABI {library.abi_version()}, this binding wants {ABI}"
    return library, None


_lib, _why = _load()


def available() -> bool:
    """Whether the compiled kernels are there."""
    return _why is None


def why_unavailable() -> str | None:
    """The reason when :func:`available` is false, else None."""
    return _why


def isa() -> str:
    """The instruction set in use."""
    return str(_lib.isa().decode())


def isas() -> list[str]:
    """The instruction sets that are compiled in and that this CPU runs, best first."""
    return [str(name) for name in _lib.isas().decode().split()]


def force_isa(name: str) -> None:
    """Use another variant, for tests. Raises ValueError if this CPU cannot run it."""
    if _lib.force_isa(name.encode()):
        raise ValueError(f"instruction set {name!r} is not among {isas()}")


# --- threads ---

_threading = "serial until an engine starts"


def threading() -> str:
    """How kernels are spread over cores, in words: "torch's libgomp, 2 threads", "serial: why"."""
    return _threading


def threads() -> int:
    """The number of threads a kernel may use."""
    return int(_lib.threads())


def set_threads(count: int | None = None) -> str:
    """Let kernels use `count` threads of the OpenMP runtime this process already has.

    The default is torch's own number if torch is imported, else :func:`core_count`. No second
    runtime is ever loaded; when there is none, kernels run serially. Returns :func:`threading`.
    """
    global _threading
    if count is None:
        torch = sys.modules.get("torch")
        count = int(torch.get_num_threads()) if torch else core_count()
    if count < 1:
        raise ValueError(f"threads must be at least 1, not {count}")
    address, name = _find_openmp() if count > 1 else (None, "one thread asked for")
    _lib.set_threads(address, count)
    _threading = f"serial: {name}" if address is None else f"{name}, {count} threads"
    return _threading


_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)[-.\d\w]*\.(so|dylib)")


def openmp_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes mapped into this process, torch's own first."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line}
    found = [path for path in paths if _RUNTIME.match(os.path.basename(path))]
    return sorted(found, key=lambda path: ("/torch" not in path, path))


def _find_openmp() -> tuple[int | None, str]:
    """The address of GOMP_parallel (libgomp's entry; libomp and libiomp5 export it too)."""
    for path in openmp_runtimes():
        try:
            # RTLD_NOLOAD: only a handle to what is there.
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            address = ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
        name = os.path.basename(path).split(".")[0].split("-")[0]
        return address, f"torch's {name}" if "/torch" in path else name
    try:
        address = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
        return address, "the process's OpenMP runtime"
    except (OSError, AttributeError, TypeError):
        return None, "no OpenMP runtime is loaded in this process"


def core_count(root: str = "/") -> int:
    """Cores this process may use: its affinity, cut down to the cgroup CPU quota; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = [q for q in _cgroup_quotas(Path(root)) if q > 0]
    return max(1, int(min([float(count or 1), *quotas])))


def _cgroup_quotas(root: Path) -> list[float]:
    """CPU quotas, in cores, of this process's control groups and their parents (v1 and v2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    quotas: list[float] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            bases = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            bases = [root / "sys/fs/cgroup" / name for name in (controllers, "cpu")]
        else:
            continue
        for base in bases:
            # Inside a container the group's own path may not be mounted: its root is then ours.
            folder = base / group.lstrip("/")
            for parent in [folder, *folder.parents]:
                if parent == base or base in parent.parents:
                    quotas += _quota(parent)
    return quotas


def _quota(folder: Path) -> list[float]:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
        return [] if limit == "max" else [int(limit) / int(period)]
    except (OSError, ValueError):
        pass
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return [quota / int((folder / "cpu.cfs_period_us").read_text())] if quota > 0 else []
    except (OSError, ValueError):
        return []


# --- arguments ---

_codes: dict[Any, int] = {}


def dtype_code(dtype: Any) -> int:
    """The library's code of a torch dtype. Raises TypeError if kernels do not take it."""
    code = _codes.get(dtype)
    if code is None:
        import torch

        _codes.update({torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16})
        code = _codes.get(dtype)
    if code is None:
        raise TypeError(f"CPU kernels take float32, bfloat16 or float16, not {dtype}")
    return code


def _address(array: HostArray) -> int:
    """Where the elements of a torch tensor or numpy array are."""
    pointer = getattr(array, "data_ptr", None)
    return int(pointer() if pointer is not None else array.ctypes.data)  # type: ignore[union-attr]


def _host(array: HostArray, name: str, dtype: str, dimensions: int) -> int:
    """The address of a contiguous host array of the given type, or an error that names it."""
    if str(array.dtype).removeprefix("torch.") != dtype or array.ndim != dimensions:
        raise TypeError(
            f"{name} must be a {dimensions}-d array of {dtype}, "
            f"not a {array.ndim}-d one of {array.dtype}"
        )
    is_contiguous = getattr(array, "is_contiguous", None)
    if not (is_contiguous() if is_contiguous is not None else array.flags.c_contiguous):  # type: ignore[union-attr]
        raise TypeError(f"{name} must be contiguous")
    return _address(array)


def _fail(status: int, what: str) -> None:
    if status == -2:
        raise MemoryError(f"{what}: no memory for scratch space")
    raise ValueError(f"{what}: the kernel refuses these sizes or codes (status {status})")


def _check_sizes(head_size: int, head_size_v: int, block_size: int) -> None:
    if block_size < 1 or block_size % BLOCK_MULTIPLE:
        raise ValueError(f"block size must be a multiple of {BLOCK_MULTIPLE}, not {block_size}")
    for size in (head_size, head_size_v):
        if not 8 <= size <= 256 or size % HEAD_MULTIPLE:
            raise ValueError(f"head size must be a multiple of 8 from 8 to 256, not {size}")


def kv_shapes(
    blocks: int, kv_heads: int, head_size: int, head_size_v: int, block_size: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """The shapes of a layer's K and V cache: contiguous, K transposed inside each block."""
    _check_sizes(head_size, head_size_v, block_size)
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
    ) -> None:
        """`slots` int64 [T]: block * block_size + offset for each token, negative to skip it."""
        _check_sizes(head_size, head_size_v, block_size)
        address = _host(slots, "slots", "int64", 1)
        super().__init__(
            address,
            len(slots),
            k_row_stride,
            v_row_stride,
            dtype_code(dtype),
            dtype_code(kv_dtype),
            kv_heads,
            head_size,
            head_size_v,
            block_size,
        )
        self.keep = slots
        self.address = ctypes.addressof(self)


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
        address = None if sinks is None else _host(sinks, "sinks", "float32", 1)
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
    ) -> None:
        """int32 arrays: `block_tables` [S, blocks], `query_start` [S + 1], `context_lens` [S].

        Sequence s has the query rows query_start[s] to query_start[s + 1] (none: padding), the last
        ones of its context_lens[s] positions, whose keys and values are already written.
        """
        _check_sizes(head_size, head_size_v, block_size)
        if kv_heads < 1 or q_heads % kv_heads:
            raise ValueError(f"{q_heads} query heads do not divide over {kv_heads} KV heads")
        sequences, width = block_tables.shape
        if len(query_start) != sequences + 1 or len(context_lens) != sequences:
            raise ValueError(
                f"{sequences} block tables need {sequences + 1} query starts and {sequences} "
                f"context lengths, not {len(query_start)} and {len(context_lens)}"
            )
        super().__init__(
            _host(block_tables, "block_tables", "int32", 2),
            _host(query_start, "query_start", "int32", 1),
            _host(context_lens, "context_lens", "int32", 1),
            width,
            out_row_stride,
            q_row_stride,
            sequences,
            dtype_code(dtype),
            dtype_code(kv_dtype),
            q_heads,
            kv_heads,
            head_size,
            head_size_v,
            block_size,
        )
        self.keep = (block_tables, query_start, context_lens)
        self.address = ctypes.addressof(self)


# --- kernels ---


def write_kv(step: WriteStep, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k [T, kv_heads, head_size] and v [T, kv_heads, head_size_v] at the step's slots."""
    status = _lib.write_kv(
        step.address, k_cache.data_ptr(), v_cache.data_ptr(), k.data_ptr(), v.data_ptr()
    )
    if status:
        _fail(status, "write_kv")


def paged_attention(
    step: AttentionStep,
    layer: AttentionLayer,
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    """out [T, q_heads, head_size_v] = causal attention of q [T, q_heads, head_size].

    A row's bits depend neither on the batch nor on chunking nor on the number of threads. Rows from
    query_start[S] on are left alone.
    """
    status = _lib.paged_attention(
        step.address,
        layer.address,
        out.data_ptr(),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
    )
    if status:
        _fail(status, "paged_attention")


def copy_blocks(cache: Tensor, pairs: HostArray) -> None:
    """Copy blocks inside a K or V cache, in order; `pairs` int64 [n, 2]: source, destination."""
    _lib.copy_blocks(
        cache.data_ptr(), cache.stride(0) * cache.element_size(), _address(pairs), len(pairs)
    )


def gather_blocks(out: Tensor, cache: Tensor, ids: HostArray) -> None:
    """Copy blocks `ids` int64 [n] of a K or V cache to the contiguous `out` [n, ...]."""
    size = cache.stride(0) * cache.element_size()
    _lib.gather_blocks(out.data_ptr(), cache.data_ptr(), size, _address(ids), len(ids))


def scatter_blocks(cache: Tensor, data: Tensor, ids: HostArray) -> None:
    """Copy the contiguous `data` [n, ...] to blocks `ids` int64 [n] of a K or V cache."""
    size = cache.stride(0) * cache.element_size()
    _lib.scatter_blocks(cache.data_ptr(), data.data_ptr(), size, _address(ids), len(ids))


_NORM = struct.Struct("=7q2i2f")


def _norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float) -> bytes:
    if x.ndim == 2:
        rows, n = x.shape
        heads, out_head, x_head = 1, 0, 0
    else:
        rows, heads, n = x.shape
        out_head, x_head = out.stride(1), x.stride(1)
    return _NORM.pack(
        rows,
        heads,
        n,
        out.stride(0),
        out_head,
        x.stride(0),
        x_head,
        dtype_code(x.dtype),
        dtype_code(weight.dtype),
        eps,
        offset,
    )


def rms_norm(
    out: Tensor, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> None:
    """out = x / rms(x) * (weight + weight_offset) over the last dimension of x [T, n] or [T, H, n].

    `out` may be `x`. Weights may be of another dtype; the result is rounded once.
    """
    packed = _norm(out, x, weight, eps, weight_offset)
    status = _lib.rms_norm(packed, out.data_ptr(), x.data_ptr(), weight.data_ptr())
    if status:
        _fail(status, "rms_norm")


def add_rms_norm(
    out: Tensor,
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> None:
    """residual += x, then out = rms_norm(residual); all [T, n]; `out` may be `x`."""
    status = _lib.add_rms_norm(
        _norm(out, x, weight, eps, weight_offset),
        out.data_ptr(),
        residual.data_ptr(),
        residual.stride(0),
        x.data_ptr(),
        weight.data_ptr(),
    )
    if status:
        _fail(status, "add_rms_norm")


def rotary(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, head_size: int, style: int = NEOX
) -> None:
    """Rotate q and k in place; rows hold heads of `head_size` side by side ([T, H * D] or [T, H, D]).

    `positions` int32 or int64 [T] (negative: leave the row alone); `cos_sin` float32
    [max_position, rotary_dim], cosines then sines.
    """
    status = _lib.rotary(
        q.data_ptr(),
        k.data_ptr(),
        positions.data_ptr(),
        positions.element_size() == 8,
        cos_sin.data_ptr(),
        positions.shape[0],
        q[0].numel() // head_size if q.ndim == 2 else q.shape[1],
        k[0].numel() // head_size if k.ndim == 2 else k.shape[1],
        head_size,
        cos_sin.shape[1],
        q.stride(0),
        k.stride(0),
        style,
        dtype_code(q.dtype),
    )
    if status:
        _fail(status, "rotary")


def act_and_mul(out: Tensor, gate_up: Tensor, kind: str = "silu") -> None:
    """out [T, n] = act(gate) * up for gate_up [T, 2n]; kind: silu, gelu or gelu_tanh."""
    rows, n = out.shape
    status = _lib.act_and_mul(
        out.data_ptr(),
        gate_up.data_ptr(),
        rows,
        n,
        out.stride(0),
        gate_up.stride(0),
        ACTIVATIONS[kind],
        dtype_code(gate_up.dtype),
    )
    if status:
        _fail(status, "act_and_mul")


def sample(
    out: Tensor,
    logits: Tensor,
    *,
    temperature: HostArray | None = None,
    top_k: HostArray | None = None,
    top_p: HostArray | None = None,
    min_p: HostArray | None = None,
    seed: HostArray | None = None,
    counter: HostArray | None = None,
) -> None:
    """Draw out int64 [B] from float32 logits [B, V]; each setting is an array [B] or None (off).

    `temperature` float32 (0: greedy, the lowest id on ties; None: 1), `top_k` int32 (0: off; ties
    with the k-th logit are kept), `top_p` float32 (1: off; the fewest most probable tokens that
    reach it, with those that tie with the last), `min_p` float32 (0: off), `seed` and `counter`
    uint64 (or int64 of the same bits). -inf logits are never chosen; -1 for a row of only -inf, or
    with a NaN. Rows must be contiguous.
    """
    status = _lib.sample(
        out.data_ptr(),
        logits.data_ptr(),
        logits.shape[0],
        logits.shape[1],
        logits.stride(0),
        None if temperature is None else _address(temperature),
        None if top_k is None else _address(top_k),
        None if top_p is None else _address(top_p),
        None if min_p is None else _address(min_p),
        None if seed is None else _address(seed),
        None if counter is None else _address(counter),
    )
    if status:
        _fail(status, "sample")


def token_logprobs(
    logprob: Tensor, rank: Tensor, logsumexp: Tensor, logits: Tensor, ids: Tensor
) -> None:
    """Of float32 logits [B, V] and ids int64 [B]: the id's log-probability (float32 [B]), its rank
    (int64 [B]: 1 + the number of tokens with a larger logit) and logsumexp (float32 [B]).
    """
    status = _lib.token_logprobs(
        logprob.data_ptr(),
        rank.data_ptr(),
        logsumexp.data_ptr(),
        logits.data_ptr(),
        ids.data_ptr(),
        logits.shape[0],
        logits.shape[1],
        logits.stride(0),
    )
    if status:
        _fail(status, "token_logprobs")
