"""The shared library: loading it, its variants, and how arguments reach it."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    HostArray = Tensor | np.ndarray[Any, Any]

ABI: Final = 5
F32, BF16, F16, INT8, INT4, CODES8, CODES4 = 0, 1, 2, 3, 4, 5, 6

_P, _I, _I64, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "abi_version": (_I, []),
    "isa": (ctypes.c_char_p, []),
    "isas": (ctypes.c_char_p, []),
    "force_isa": (_I, [ctypes.c_char_p]),
    "set_threads": (_I, [_I, _I]),
    "threads": (_I, []),
    "profile": (None, [_I]),
    "profile_read": (None, [_P]),
    "peak": (ctypes.c_double, [_I, _I64]),
    "read": (ctypes.c_uint32, [_P, _I64]),
    "write_kv": (_I, [_P] * 5),
    "copy_blocks": (None, [_P, ctypes.c_size_t, ctypes.c_size_t, _P, _I64]),
    "gather_blocks": (None, [_P, _P, ctypes.c_size_t, ctypes.c_size_t, _P, _I64]),
    "scatter_blocks": (None, [_P, _P, ctypes.c_size_t, ctypes.c_size_t, _P, _I64]),
    "paged_attention": (_I, [_P] * 6),
    "rms_norm": (_I, [_P] * 4),
    "add_rms_norm": (_I, [_P, _P, _P, _I64, _P, _P]),
    "rotary": (_I, [_P, _P, _P, _I, _P, _I64, _I, _I, _I, _I, _I64, _I64, _I, _I]),
    "act_and_mul": (_I, [_P, _P, _I64, _I64, _I64, _I64, _I, _I]),
    "sample": (_I, [_P, _P, _I64, _I64, _I64, _P, _P, _P, _P, _P, _P]),
    "token_logprobs": (_I, [_P, _P, _P, _P, _P, _I64, _I64, _I64]),
    "best_allowed": (_I, [_P, _P, _I64, _I64, _P, _P, _I64, _I64]),
    "mask_logits": (None, [_P, _I64, _I64, _P, _P, _I64, _I64]),
    "weight_bytes": (_I64, [_P]),
    "pack_weight": (_I, [_P, _P, _P, _I]),
    "pack_codes": (_I, [_P, _P, _P, _P]),
    "unpack_rows": (_I, [_P, _P, _P, _I64]),
    "linear": (_I, [_P, _P, _I64, _P, _I64, _I64, _P]),
    "decoder_layers": (_I, [_P, _P, _I64, _P]),
    "decoder_logits": (_I, [_P, _P, _I64, _P, _P, _P, _I64, _P, _I64]),
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
        with importlib.resources.as_file(importlib.resources.files(__package__) / name) as path:
            library = _Functions(path)
    except (OSError, AttributeError) as error:
        return _Missing(), f"{name} was not built or does not load ({error})"
    if library.abi_version() != ABI:
        return _Missing(), f"{name} has ABI {library.abi_version()}, this binding wants {ABI}"
    return library, None


lib, _why = _load()


def available() -> bool:
    """Whether the compiled kernels are there."""
    return _why is None


def why_unavailable() -> str | None:
    """The reason when :func:`available` is false, else None."""
    return _why


def isa() -> str:
    """The instruction set in use."""
    return str(lib.isa().decode())


def isas() -> list[str]:
    """The instruction sets that are compiled in and that this CPU runs, best first."""
    return [str(name) for name in lib.isas().decode().split()]


def force_isa(name: str) -> None:
    """Use another variant, for tests. Raises ValueError if this CPU cannot run it."""
    if lib.force_isa(name.encode()):
        raise ValueError(f"instruction set {name!r} is not among {isas()}")


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


def kv_dtype_code(dtype: Any) -> int:
    """The same for a KV cache, which may be int8 too."""
    return INT8 if _name(dtype) == "int8" else dtype_code(dtype)


def address(array: HostArray) -> int:
    """Where the elements of a torch tensor or numpy array are."""
    pointer = getattr(array, "data_ptr", None)
    return int(pointer() if pointer is not None else array.ctypes.data)  # type: ignore[union-attr]


@cache
def _name(dtype: Any) -> str:
    """Of a torch or numpy dtype; cached, as numpy takes longer to write it than a small kernel runs."""
    return str(dtype).removeprefix("torch.")


def host(array: HostArray, name: str, dtype: str, dimensions: int) -> int:
    """The address of a contiguous host array of the given type, or an error that names it."""
    if _name(array.dtype) != dtype or array.ndim != dimensions:
        raise TypeError(
            f"{name} must be a {dimensions}-d array of {dtype}, "
            f"not a {array.ndim}-d one of {array.dtype}"
        )
    is_contiguous = getattr(array, "is_contiguous", None)
    if not (is_contiguous() if is_contiguous is not None else array.flags.c_contiguous):  # type: ignore[union-attr]
        raise TypeError(f"{name} must be contiguous")
    return address(array)


def fail(status: int, what: str) -> NoReturn:
    """Raises what a kernel's status means."""
    if status == -2:
        raise MemoryError(f"{what}: no memory for scratch space")
    raise ValueError(f"{what}: the kernel refuses these sizes or codes (status {status})")
