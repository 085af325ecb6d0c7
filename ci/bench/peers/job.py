"""What an adapter is asked for, as JSON. Standard library only: every engine's environment reads it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["throughput", "startup", "batched"]


@dataclass(frozen=True)
class Item:
    """One request: its prompt as token ids, and the tokens to generate, whatever they are."""

    prompt: list[int]
    output: int


@dataclass(frozen=True)
class Job:
    """One measurement of one engine in one fresh process.

    kind: "throughput" runs `warm_up`, then `items` under the clock; "startup" runs `items` as the
    first thing the process does; "batched" is the engine's own benchmark tool.
    sequential: one request after the other; otherwise all are submitted at once.
    threads: compute threads, one for each core.
    options: the engine's own settings.
    spawned: `time.monotonic()` just before the process was started.
    """

    work: str
    kind: Kind
    items: list[Item]
    warm_up: list[Item] = field(default_factory=list)
    sequential: bool = False
    threads: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    spawned: float = 0.0

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output; warm-up included."""
        return max(len(item.prompt) + item.output for item in [*self.items, *self.warm_up])

    def first(self, count: int | None) -> Job:
        """The same with the first `count` requests only; None keeps all."""
        return dataclasses.replace(self, items=self.items[:count])

    def with_options(self, options: dict[str, Any]) -> Job:
        """The same for an engine with these options."""
        return dataclasses.replace(self, options=options)

    def digest(self) -> str:
        """Changes with everything that a result depends on, and with nothing else."""
        values = dataclasses.asdict(self) | {"spawned": 0.0}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        for name in ("items", "warm_up"):
            values[name] = [Item(**item) for item in values[name]]
        return cls(**values)
