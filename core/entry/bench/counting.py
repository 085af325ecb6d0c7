"""Operations and bytes that a step needs, from the model's shapes alone: what no program could save.

A multiply-add is two operations. Bytes are those that must come from memory or go there: weights once a
step, keys and values, logits. Activations are taken to stay in the caches. What a step reads again because
a cache was too small is the program's doing, and so part of the gap to the floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.core.contract import KVSpec, ModelShape, WeightSpec
from octavo.core.instruments import Peaks

PHASES = ("linear", "attention", "elementwise", "sampling", "host")
"""elementwise: embedding, norms, rotation and the cache's scatter, activation, quantising."""

_ELEMENT = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "int8": 1.0,
    "int4": 0.5,
    "codes8": 1.0,
    "codes4": 0.5,
}
# Bytes of scale and minimum for each input; int8's one a row is nothing.
_SCALES = {"int4": 4 / 32, "codes4": 4 / 32, "codes8": 2 / 32}

_NORM, _ROTATE, _ACTIVATE, _QUANTISE, _COMPARE = 4, 3, 6, 3, 1
"""Operations on an element: square, add, scale, weigh; four products and two sums on a pair; SiLU and its
product; largest magnitude, scale, round; greedy's search."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step does of one sequence: `new` tokens, the last of `context` that exist afterwards."""

    new: int
    context: int

    def visible(self, window: int) -> int:
        """Positions that its new tokens see, added up."""
        first = self.context - self.new + 1
        if not window or self.context <= window:
            return (first + self.context) * self.new // 2
        return sum(min(window, seen) for seen in range(first, self.context + 1))

    def held(self, window: int) -> int:
        """Positions whose keys and values are read."""
        return min(self.context, window + self.new - 1) if window else self.context


@dataclass(frozen=True, slots=True)
class Work:
    """One phase: operations by kind ("float32" or "int8": which peak bounds them) and bytes."""

    float32: float = 0.0
    int8: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.float32 + other.float32, self.int8 + other.int8, self.bytes + other.bytes)

    def seconds(self, peaks: Peaks) -> float:
        """The least time: by arithmetic or by memory, whichever is more."""
        busy = self.float32 / peaks.float32 + self.int8 / peaks.int8
        return max(busy, self.bytes / peaks.read_bytes)


def bytes_per_weight(form: str) -> float:
    """Bytes of one element of a weight kept as `form`, scales included.

    Raises:
        ValueError: a format whose size is not known.
    """
    for name, size in _ELEMENT.items():
        if form.startswith(name):
            return size + _SCALES.get(name, 0.0)
    raise ValueError(f"weights kept as {form!r}: known are {', '.join(_ELEMENT)}")


def step_work(
    specs: Iterable[WeightSpec], shape: ModelShape, dtype: str, chunks: Sequence[Chunk]
) -> dict[str, Work]:
    """The work of a greedy step, by phase.

    Args:
        specs: the model's weights; dtype: how those without a scheme are kept.
        chunks: one for each sequence; each draws one token.
    """
    tokens, draws = sum(chunk.new for chunk in chunks), len(chunks)
    found = dict.fromkeys(PHASES, Work())
    for spec in specs:
        for phase, work in _of_weight(spec, shape, dtype, tokens, draws):
            found[phase] += work
    for kv in shape.kv:
        layers = len(kv.layers)
        element = bytes_per_weight(kv.dtype) * kv.kv_heads
        columns = kv.head_size + kv.head_size_v
        seen = sum(chunk.visible(_window(kv)) for chunk in chunks)
        held = sum(chunk.held(_window(kv)) for chunk in chunks)
        found["attention"] += Work(
            float32=layers * 2.0 * shape.q_heads * columns * seen,
            bytes=layers * element * columns * held,
        )
        rotated = (shape.q_heads + kv.kv_heads) * kv.head_size
        found["elementwise"] += Work(
            float32=layers * float(_ROTATE) * tokens * rotated,
            bytes=layers * element * columns * tokens,
        )
    logits = float(draws * shape.vocab_size)
    found["sampling"] = Work(float32=_COMPARE * logits, bytes=4 * logits)
    return found


def _window(spec: KVSpec) -> int:
    return spec.window if spec.kind == "window" else 0


def _of_weight(
    spec: WeightSpec, shape: ModelShape, dtype: str, tokens: int, draws: int
) -> list[tuple[str, Work]]:
    if spec.role == "embedding":
        return [("elementwise", Work(bytes=tokens * shape.hidden_size * bytes_per_weight(dtype)))]
    if spec.role == "norm":
        return [("elementwise", Work(float32=float(_NORM * tokens * spec.shape[0])))]
    if spec.role not in ("linear", "head"):
        return []
    n, k = spec.shape
    form = spec.scheme or dtype
    head = spec.role == "head"
    rows = draws if head else tokens
    operations = 2.0 * rows * n * k
    size = n * k * bytes_per_weight(form) + (4.0 * rows * n if head else 0.0)
    if not form.startswith("int"):
        found = [("linear", Work(float32=operations, bytes=size))]
    else:
        found = [
            ("linear", Work(int8=operations, bytes=size)),
            ("elementwise", Work(float32=float(_QUANTISE * rows * k))),
        ]
    if spec.gated:
        found.append(("elementwise", Work(float32=_ACTIVATE * rows * n / 2)))
    return found
