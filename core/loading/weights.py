"""Weights by name, from safetensors or GGUF. Nothing is ever unpickled."""

from __future__ import annotations

import difflib
import json
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from octavo.core.loading.errors import CorruptFileError, ModelError, WeightsError
from octavo.core.loading.files import ModelFiles, drop_pages, read_json
from octavo.core.loading.gguf_weights import GgufWeights
from octavo.core.loading.progress import Progress
from octavo.core.quantization.base import QuantizedTensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER = 100 << 20  # what the safetensors format allows
_MAX_LISTED = 8


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's shape, and the dtype ``get`` returns it in."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: its bytes' place from the file's start, and how many."""

    info: TensorInfo
    offset: int
    nbytes: int


class WeightSource(Protocol):
    """Named tensors of one model, read when asked for."""

    def names(self) -> dict[str, TensorInfo]:
        """Every tensor, without reading any."""

    def get(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, memory-mapped where the format allows; do not write to it.

        Raises WeightsError for a name the source lacks.
        """

    def codes(self, name: str, form: str, group: int) -> QuantizedTensor | None:
        """A matrix in a canonical quantised form, when the files keep it in that very grid."""

    def release(self, name: str) -> None:
        """Let the memory of a tensor go that ``get`` gave. It can be used and got again: its pages
        come from the file once more."""

    def close(self) -> None:
        """Let the files go."""


def open_weights(files: ModelFiles, progress: Progress | None = None) -> WeightSource:
    """The weights of a resolved model. progress: shown what ``get`` has read, in bytes.

    Raises WeightsError when there are none that can be read or a shard is missing,
    CorruptFileError when a file is truncated or its header is damaged.
    """
    source = _GgufSource(files.path) if files.kind == "gguf" else SafetensorsSource(files.path)
    return source if progress is None else _ReportedSource(source, files.name, progress)


class _ReportedSource:
    """A source that says how much of it has been read."""

    def __init__(self, source: WeightSource, name: str, progress: Progress) -> None:
        self._source = source
        infos = source.names().values()
        total = sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)
        self._task = progress.task(f"Loading weights of {name}", total)

    def names(self) -> dict[str, TensorInfo]:
        return self._source.names()

    def get(self, name: str) -> torch.Tensor:
        tensor = self._source.get(name)
        self._task.advance(tensor.nbytes)
        return tensor

    def codes(self, name: str, form: str, group: int) -> QuantizedTensor | None:
        found = self._source.codes(name, form, group)
        if found is not None:
            info = self._source.names()[name]
            self._task.advance(math.prod(info.shape) * info.dtype.itemsize)
        return found

    def release(self, name: str) -> None:
        self._source.release(name)

    def close(self) -> None:
        self._task.close()
        self._source.close()


class _GgufSource:
    """GGUF through the same door."""

    def __init__(self, path: Path) -> None:
        self._weights = GgufWeights(path)

    def names(self) -> dict[str, TensorInfo]:
        shapes = self._weights.shapes().items()
        return {name: TensorInfo(shape, torch.float32) for name, shape in shapes}

    def get(self, name: str) -> torch.Tensor:
        return self._weights.get(name)

    def codes(self, name: str, form: str, group: int) -> QuantizedTensor | None:
        return self._weights.codes(name, form, group)

    def release(self, name: str) -> None:
        self._weights.release(name)

    def close(self) -> None:
        self._weights.close()


class SafetensorsSource:
    """A folder's safetensors: model.safetensors, the index's shards, or all there are."""

    def __init__(self, folder: Path) -> None:
        self._stored: dict[str, tuple[Path, StoredTensor]] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for path in _shards(folder):
            for name, tensor in read_header(path).items():
                if name in self._stored:
                    raise WeightsError(
                        f"tensor {name!r} is in both {self._stored[name][0].name} and {path.name} of "
                        f"{folder}; remove the file that does not belong there."
                    )
                self._stored[name] = path, tensor

    def names(self) -> dict[str, TensorInfo]:
        return {name: tensor.info for name, (_, tensor) in self._stored.items()}

    def get(self, name: str) -> torch.Tensor:
        path, stored = self._find(name)
        if path not in self._maps:
            with path.open("rb") as file:
                # Private pages: a tensor may lie in the map without a write reaching the file.
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if not stored.nbytes:
            return torch.empty(stored.info.shape, dtype=stored.info.dtype)
        # By way of numpy, whose array keeps the mapping alive when this source is closed.
        raw = np.frombuffer(self._maps[path], np.uint8, stored.nbytes, stored.offset)
        return torch.from_numpy(raw).view(stored.info.dtype).view(stored.info.shape)

    def release(self, name: str) -> None:
        path, stored = self._find(name)
        if path in self._maps:
            drop_pages(self._maps[path], stored.offset, stored.nbytes)

    def _find(self, name: str) -> tuple[Path, StoredTensor]:
        if name not in self._stored:
            raise WeightsError(f"no tensor {name!r}{_nearest(name, self._stored)}")
        return self._stored[name]

    def codes(self, name: str, form: str, group: int) -> QuantizedTensor | None:
        return None  # plain numbers; a scheme reads what else there is by `get`

    def close(self) -> None:
        self._maps.clear()


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        value = read_json(index)
        mapping = value.get("weight_map") if isinstance(value, dict) else None
        if not isinstance(mapping, dict):
            raise CorruptFileError(f"{index} has no weight_map; fetch the model again.")
        names = sorted(set(mapping.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise WeightsError(
                f"{len(missing)} of {len(names)} shards named in {index} are missing: "
                f"{_listed(missing)}. Fetch the model again."
            )
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(
        path.name for path in folder.glob("*.pt*")
    )
    if pickles:
        raise WeightsError(
            f"{folder} has its weights only as {_listed(pickles)}. Pickle files can run code and "
            "are never unpickled here. Convert them where you trust them: load the model with "
            "transformers and save_pretrained(folder, safe_serialization=True)."
        )
    raise WeightsError(f"{folder} holds no .safetensors file")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """A safetensors file's tensors, from its header alone.

    Format: 8 bytes of header length (little-endian), a JSON header, then the data. Raises
    CorruptFileError naming the file, and the tensor where one is cut off.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size + 1
        if length > min(size - 8, _MAX_HEADER):
            raise CorruptFileError(
                f"{path} is truncated or no safetensors file: its header ends after the file "
                f"({size} bytes). Fetch the file again."
            )
        raw = file.read(length)
    found: dict[str, StoredTensor] = {}
    try:
        header = json.loads(raw)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if end > size:
                raise CorruptFileError(
                    f"{path} is truncated: tensor {name!r} ends {end - size} bytes after the file. "
                    "Fetch the file again."
                )
            if entry["dtype"] not in _DTYPES:
                raise WeightsError(
                    f"{path}: tensor {name!r} has dtype {entry['dtype']}; these are read: "
                    f"{', '.join(_DTYPES)}"
                )
            info = TensorInfo(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
            if end - begin != math.prod(info.shape) * info.dtype.itemsize:
                raise ValueError(f"tensor {name!r} of {end - begin} bytes is not {entry['shape']}")
            found[name] = StoredTensor(info, begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise CorruptFileError(
            f"{path} has a damaged header ({type(error).__name__}: {error}). Fetch the file again."
        ) from error
    return found


def check_names(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, TensorInfo],
    *,
    ignore: Iterable[str] = (),
) -> None:
    """Check that a source holds exactly what a model needs.

    ignore: names the model knows it does not need (a tied lm_head, a buffer) and lets pass.
    Raises one WeightsError that lists what is missing (with the nearest names there are), what is
    unexpected and what has another shape.
    """
    ignored = set(ignore)
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected and name not in ignored]
    misshapen = [
        f"{name} is {list(found[name].shape)}, the model needs {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != tuple(shape)
    ]
    problems = []
    if missing:
        named = [f"{name}{_nearest(name, extra)}" for name in missing[:_MAX_LISTED]]
        problems.append(f"{len(missing)} missing: {_listed(named, len(missing))}")
    if extra:
        problems.append(f"{len(extra)} unexpected: {_listed(extra)}")
    if misshapen:
        problems.append(f"{len(misshapen)} of another shape: {_listed(misshapen)}")
    if problems:
        raise WeightsError(
            f"the weights do not fit the model ({len(expected)} tensors). {'; '.join(problems)}. "
            "Check that config.json and the weights are of the same model."
        )


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.7)
    return f" (nearest: {close[0]})" if close else ""


def _listed(items: list[str], count: int | None = None) -> str:
    rest = (len(items) if count is None else count) - min(len(items), _MAX_LISTED)
    return ", ".join(items[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
