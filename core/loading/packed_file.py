"""Packed weights in a file of their own, which a start maps instead of packing again.

Layout: magic, the length of a JSON header (8 bytes, little-endian), the header, then each weight's
bytes at a multiple of `ALIGNMENT`. The header holds the key (what the weights were made of and how),
the file's size, and for each weight its offset, size and the CRC-32 of its first and last page: what
a machine that lost power leaves behind shows there, while a whole file is mapped without being read.

A file appears by one rename after it has reached the disk, so it is whole or absent. The folder may
be read-only, the disk full, the file of another version: whoever reads or writes is told why it
cannot be used, and packs.

`origin` is where the model lies; a file whose model is gone is of no use to anybody.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.loading.files import drop_pages

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAGIC = b"OCTAVOPK"
ALIGNMENT = 4096
SUFFIX = ".packed"
_MAX_HEADER = 64 << 20


class UnusableError(Exception):
    """A file of packed weights that cannot be used; the message says why."""


@dataclass(frozen=True)
class PackedFile:
    """Where packed weights are kept.

    key: JSON values that say of what the weights were made and how; a file with another key is stale.
    """

    path: Path
    key: Mapping[str, Any]
    origin: str

    def read(self) -> dict[str, Bytes] | None:
        """Each weight's bytes (uint8, 4096-byte aligned, private pages of the mapped file); None
        when there is no file.

        Raises UnusableError when it is of another key, damaged or cannot be read.
        """
        import numpy as np

        try:
            with self.path.open("rb") as file:
                # Private and writable, because a torch tensor must be; nobody writes.
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UnusableError(f"it cannot be read ({error})") from error
        try:
            header = _header(data)
            if header["key"] != dict(self.key):
                raise UnusableError(_difference(header["key"], self.key))
            if header["size"] != len(data):
                raise UnusableError(f"it has {len(data)} bytes of {header['size']}")
            found = {}
            for name, (offset, nbytes, checksum) in header["weights"].items():
                if offset % ALIGNMENT or offset + nbytes > len(data):
                    raise UnusableError(f"{name} lies outside it")
                found[name] = np.frombuffer(data, np.uint8, nbytes, offset)
                if _checksum(found[name]) != checksum:
                    raise UnusableError(f"{name} is damaged")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnusableError(f"its header is damaged ({type(error).__name__})") from error
        return found

    def write(self, weights: Mapping[str, Bytes]) -> bool:
        """Writes the file; False when another process is at it.

        Raises OSError, and leaves nothing behind then.
        """
        from filelock import FileLock, Timeout

        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Written under the lock alone, so that what a killed process left is written over.
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0):
                try:
                    self._write(temporary, weights)
                    temporary.replace(self.path)
                except BaseException:
                    temporary.unlink(missing_ok=True)
                    raise
        except Timeout:
            return False
        return True

    def _write(self, path: Path, weights: Mapping[str, Bytes]) -> None:
        offsets: dict[str, int] = {}
        at = 0
        for name, data in weights.items():
            offsets[name] = at
            at += _aligned(data.nbytes)
        sums = {name: _checksum(data) for name, data in weights.items()}
        start = ALIGNMENT
        while len(head := self._head(weights, offsets, sums, start, start + at)) > start:
            start = _aligned(len(head))
        with path.open("wb") as file:
            file.write(head)
            for name, data in weights.items():
                file.seek(start + offsets[name])
                file.write(data.data)
            file.truncate(start + at)
            file.flush()
            os.fsync(file.fileno())

    def _head(
        self,
        weights: Mapping[str, Bytes],
        offsets: Mapping[str, int],
        sums: Mapping[str, int],
        start: int,
        size: int,
    ) -> bytes:
        table = {n: (start + offsets[n], d.nbytes, sums[n]) for n, d in weights.items()}
        header = {"origin": self.origin, "key": dict(self.key), "size": size, "weights": table}
        text = json.dumps(header).encode()
        return MAGIC + len(text).to_bytes(8, "little") + text


def let_go(data: Bytes) -> None:
    """Gives back the memory of an array that `PackedFile.read` gave. It stays readable."""
    import numpy as np

    whole = getattr(data.base, "obj", None)
    if isinstance(whole, mmap.mmap):
        start = np.frombuffer(whole, np.uint8).ctypes.data
        drop_pages(whole, data.ctypes.data - start, data.nbytes)


def remove_orphans(paths: Iterable[Path]) -> None:
    """Deletes those files of packed weights whose model is no longer where it was."""
    for path in paths:
        try:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                origin = _header(data)["origin"]
            if not Path(origin).exists():
                path.unlink()
        except (OSError, ValueError, KeyError, TypeError, UnusableError):
            continue  # not ours, or not for us to delete


def _header(data: mmap.mmap) -> dict[str, Any]:
    if data[: len(MAGIC)] != MAGIC:
        raise UnusableError("it holds no packed weights")
    begin = len(MAGIC) + 8
    length = int.from_bytes(data[len(MAGIC) : begin], "little")
    if length > min(_MAX_HEADER, len(data) - begin):
        raise UnusableError("it is cut off")
    header: dict[str, Any] = json.loads(data[begin : begin + length])
    return header


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    return f"it was made from another {', '.join(names)}"


def _checksum(data: Bytes) -> int:
    return zlib.crc32(data[-ALIGNMENT:].data, zlib.crc32(data[:ALIGNMENT].data))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
