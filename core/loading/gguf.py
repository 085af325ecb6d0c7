"""Reading a GGUF file's metadata and tensor table.

Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian. The gguf
package's reader makes one numpy object per string and takes seconds for a vocabulary; this one keeps
arrays where they lie in the mapped file until they are asked for.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from octavo.core.loading.errors import CorruptFileError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# value type -> struct code: u8 i8 u16 i16 u32 i32 f32 bool u64 i64 f64
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_MAX_DIMS = 4
# ggml type: (elements, bytes) of a block, for F32 F16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K BF16
_BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    30: (1, 2),
}
_U64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies and how it is stored.

    shape: torch order (slowest first). type: the ggml type id. offset: from the file's start.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _ArrayRef:
    type: int
    count: int
    offset: int


class GgufFile:
    """A GGUF file, mapped. Reads its tables at once and tensor data never.

    Raises CorruptFileError naming the file, and the tensor where one is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                # Private pages: a tensor may lie in the map without a write reaching the file.
                self.data: mmap.mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except ValueError as error:
                raise CorruptFileError(f"{path} is empty") from error
        self._metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise CorruptFileError(
                f"{path} is truncated or damaged: its tables do not parse ({error}). "
                "Fetch the file again."
            ) from error

    def close(self) -> None:
        """Unmap the file, or let the last tensor that lies in it do so."""
        with contextlib.suppress(BufferError):
            self.data.close()

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def keys(self) -> list[str]:
        """The metadata keys, in the file's order."""
        return list(self._metadata)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; an array as a list. ``default`` when the file does not state it."""
        value = self._metadata.get(key, default)
        return self._array(value) if isinstance(value, _ArrayRef) else value

    def length(self, key: str) -> int | None:
        """The number of elements of an array value, without reading them."""
        value = self._metadata.get(key)
        return value.count if isinstance(value, _ArrayRef) else None

    @property
    def architecture(self) -> str:
        """``general.architecture``, e.g. llama."""
        value = self.get("general.architecture")
        if not isinstance(value, str):
            raise CorruptFileError(f"{self.path} states no general.architecture")
        return value

    def _read(self) -> None:
        data, size = self.data, len(self.data)
        if data[:4] != _MAGIC:
            raise CorruptFileError(f"{self.path} is not a GGUF file: it begins with {data[:4]!r}")
        version, num_tensors, num_values = struct.unpack_from("<IQQ", data, 4)
        if version not in (2, 3):
            raise CorruptFileError(
                f"{self.path} has GGUF version {version}; 2 and 3 (little-endian) are read. Convert "
                "it again with a current converter."
            )
        if max(num_tensors, num_values) > size // 8:
            raise CorruptFileError(f"{self.path} has a damaged header: more entries than bytes")
        at = 24
        for _ in range(num_values):
            key, at = self._string(at)
            (kind,) = struct.unpack_from("<I", data, at)
            self._metadata[key], at = self._value(kind, at + 4)
        table: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, at = self._string(at)
            (dims,) = struct.unpack_from("<I", data, at)
            if dims > _MAX_DIMS:
                raise CorruptFileError(f"{self.path}: tensor {name!r} claims {dims} dimensions")
            shape = struct.unpack_from(f"<{dims}Q", data, at + 4)
            at += 4 + 8 * dims
            kind, offset = struct.unpack_from("<IQ", data, at)
            at += 12
            table.append((name, shape[::-1], kind, offset))
        self._place(table, at)

    def _place(self, table: list[tuple[str, tuple[int, ...], int, int]], end: int) -> None:
        alignment = self.get("general.alignment", 32)
        start = (end + alignment - 1) // alignment * alignment
        for name, shape, kind, offset in table:
            nbytes = self._num_bytes(name, shape, kind)
            if start + offset + nbytes > len(self.data):
                missing = start + offset + nbytes - len(self.data)
                raise CorruptFileError(
                    f"{self.path} is truncated: tensor {name!r} ends {missing} bytes after the file. "
                    "Fetch the file again."
                )
            self.tensors[name] = GgufTensor(name, shape, kind, start + offset, nbytes)

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        try:
            block, width = _block_size(kind)
        except KeyError:
            raise CorruptFileError(
                f"{self.path}: tensor {name!r} has ggml type {kind}, which is not known. Requantise "
                "the file with a common type, such as Q8_0 or Q4_K."
            ) from None
        if shape and shape[-1] % block:
            raise CorruptFileError(
                f"{self.path}: rows of tensor {name!r} (shape {shape}) are no whole number of "
                f"blocks of {block}"
            )
        return prod(shape) // block * width

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = _U64(self.data, at)
        end = at + 8 + length
        if end > len(self.data):
            raise struct.error(f"a string of {length} bytes at byte {at} ends after the file")
        return self.data[at + 8 : end].decode("utf-8"), end

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(at)
        if kind == _ARRAY:
            element, count = struct.unpack_from("<IQ", self.data, at)
            ref = _ArrayRef(element, count, at + 12)
            return ref, self._skip(ref)
        code = self._code(kind, at)
        (value,) = struct.unpack_from("<" + code, self.data, at)
        return value, at + struct.calcsize("<" + code)

    def _code(self, kind: int, at: int) -> str:
        if kind not in _SCALARS:
            raise struct.error(f"value type {kind} at byte {at} is not known")
        return _SCALARS[kind]

    def _skip(self, ref: _ArrayRef) -> int:
        at, size = ref.offset, len(self.data)
        if ref.count > size:
            raise struct.error(f"an array of {ref.count} elements at byte {at}")
        if ref.type != _STRING:
            return at + ref.count * struct.calcsize("<" + self._code(ref.type, at))
        data, unpack = self.data, _U64
        for _ in range(ref.count):  # strings have no stride: walking them is the only way past
            at += 8 + unpack(data, at)[0]
        return at

    def _array(self, ref: _ArrayRef) -> list[Any]:
        if ref.type != _STRING:
            code = f"<{ref.count}{self._code(ref.type, ref.offset)}"
            return list(struct.unpack_from(code, self.data, ref.offset))
        values: list[str] = []
        data, at, unpack = self.data, ref.offset, _U64
        for _ in range(ref.count):
            end = at + 8 + unpack(data, at)[0]
            values.append(data[at + 8 : end].decode("utf-8"))
            at = end
        return values


def _block_size(kind: int) -> tuple[int, int]:
    """(elements per block, bytes per block) of a ggml type. Raises KeyError for an unknown one."""
    if kind in _BLOCKS:
        return _BLOCKS[kind]
    # Rare types are looked up: importing the package would cost every start 60 ms.
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except ValueError:
        raise KeyError(kind) from None
    return int(block), int(width)
