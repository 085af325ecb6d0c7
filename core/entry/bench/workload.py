"""What a benchmark asks of the engine: prompts as token ids, and how many tokens each must bring.

Prompts are cut from the real English text in `data/` (see `data/LICENSE.txt`), so that a model's
logits, and with them its ties, are those of real use. No two prompts share a beginning unless the
workload says so: prefix caching can neither help nor hide.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import NormalDist

from octavo.core.config import ConfigError, nearest

TEXTS = ("opticks.txt", "python_reference.txt")

SHAREGPT_SEED = 636
"""With 64 requests: 11,418 prompt and 10,805 output tokens."""
_SIGMA = 1.0
_PROMPT_MU, _PROMPT_RANGE = 4.75, (8, 1024)
_OUTPUT_MU, _OUTPUT_RANGE = 4.85, (8, 500)

_SKIP = 997  # tokens by which a second pass through a text is moved, so that no prompt comes again
_WARM_UP_REQUESTS, _WARM_UP_PROMPT, _WARM_UP_OUTPUT = 4, 96, 8

_SCHEMA = json.dumps(  # no list of a request is complete within its output tokens
    {
        "type": "array",
        "minItems": 200,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "kind": {"enum": ["ship", "cargo", "payment"]},
                "amount": {"type": "number"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["name", "kind", "amount", "tags"],
            "additionalProperties": False,
        },
    }
)

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Item:
    """One request: its prompt, and the number of tokens to generate whatever they are; within a JSON schema
    that needs more of them, if there is one."""

    prompt_token_ids: list[int]
    output_len: int
    schema: str | None = None


@dataclass(frozen=True)
class Workload:
    """Requests that are submitted at once. `warm_up` runs before the clock does, with other text."""

    name: str
    seed: int
    items: tuple[Item, ...]
    warm_up: tuple[Item, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.prompt_token_ids) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(item.output_len for item in self.items)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(item.prompt_token_ids) + item.output_len for item in self.items)

    def again(self) -> Workload:
        """The same lengths, each prompt's first tokens moved to its end: the prefix cache of a run before
        cannot help. What prompts share they still share."""
        items = [
            replace(item, prompt_token_ids=item.prompt_token_ids[3:] + item.prompt_token_ids[:3])
            for item in self.items
        ]
        return replace(self, items=tuple(items))


class _Text:
    """The committed texts as token ids, handed out in slices that do not overlap."""

    def __init__(self, encode: Encode) -> None:
        folder = resources.files("octavo.core.entry.bench") / "data"
        self._ids = [encode((folder / name).read_text("utf-8")) for name in TEXTS]
        self._at = [0] * len(TEXTS)
        self._pass = [0] * len(TEXTS)
        self._turn = 0

    def take(self, count: int) -> list[int]:
        """The next `count` tokens of the text whose turn it is.

        When a text is used up it is read again from a place that is no multiple of what went
        before, so every slice begins differently.
        """
        which = self._turn % len(TEXTS)
        self._turn += 1
        ids, at = self._ids[which], self._at[which]
        if count > len(ids):
            raise ConfigError(f"a prompt of {count} tokens exceeds the text's {len(ids)}")
        if at + count > len(ids):
            self._pass[which] += 1
            at = self._pass[which] * _SKIP % (len(ids) - count + 1)
        self._at[which] = at + count
        return ids[at : at + count]


def _log_normal(draw: random.Random, mu: float, span: tuple[int, int]) -> int:
    """exp(N(mu, 1)) clipped to `span`. By inversion: only `random()` is the same in every Python."""
    value = math.exp(mu + _SIGMA * NormalDist().inv_cdf(draw.random() or 0.5))
    return min(span[1], max(span[0], round(value)))


def sharegpt_lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens of each request: log-normal, as chat logs are."""
    draw = random.Random(seed)
    return [
        (_log_normal(draw, _PROMPT_MU, _PROMPT_RANGE), _log_normal(draw, _OUTPUT_MU, _OUTPUT_RANGE))
        for _ in range(count)
    ]


def _sharegpt(text: _Text, count: int, seed: int) -> list[Item]:
    return [Item(text.take(prompt), output) for prompt, output in sharegpt_lengths(count, seed)]


def _json(text: _Text, count: int, seed: int) -> list[Item]:
    return [replace(item, schema=_SCHEMA) for item in _sharegpt(text, count, seed)]


def _uniform(text: _Text, count: int, seed: int) -> list[Item]:
    return [Item(text.take(160), 64) for _ in range(count)]


def _prefix(text: _Text, count: int, seed: int) -> list[Item]:
    shared = text.take(1024)
    return [Item(shared + text.take(32), 32) for _ in range(count)]


def _single(text: _Text, count: int, seed: int) -> list[Item]:
    return [Item(text.take(128), 128) for _ in range(count)]


def fixed_lengths(encode: Encode, lengths: Sequence[tuple[int, int]]) -> list[Item]:
    """A request for each (prompt, output) tokens; none begins as another.

    Raises:
        ConfigError: a prompt longer than the texts.
    """
    text = _Text(encode)
    return [Item(text.take(prompt), output) for prompt, output in lengths]


BUILT_IN: dict[str, tuple[Callable[[_Text, int, int], list[Item]], int, int]] = {
    "sharegpt": (_sharegpt, 64, SHAREGPT_SEED),
    "json": (_json, 64, SHAREGPT_SEED),
    "uniform": (_uniform, 32, 0),
    "prefix": (_prefix, 32, 0),
    "single": (_single, 1, 0),
}
"""name -> (maker, number of requests, seed) unless the caller gives others."""


def make_workload(
    name: str, encode: Encode, *, num_requests: int | None = None, seed: int | None = None
) -> Workload:
    """A built-in workload by name, or the requests of a .jsonl file.

    Args:
        encode: text -> token ids of the model's tokenizer, without special tokens.
        num_requests: how many; of a file the first so many.
        seed: of the lengths (sharegpt).

    Raises:
        ConfigError: an unknown name, or a file that cannot be used.
    """
    text = _Text(encode)
    warm_up = tuple(
        Item(text.take(_WARM_UP_PROMPT), _WARM_UP_OUTPUT) for _ in range(_WARM_UP_REQUESTS)
    )
    if name in BUILT_IN:
        make, count, default_seed = BUILT_IN[name]
        seed = default_seed if seed is None else seed
        items = make(text, count if num_requests is None else num_requests, seed)
        return Workload(name, seed, tuple(items), warm_up)
    path = Path(name)
    if path.suffix != ".jsonl":
        raise ConfigError(
            f"unknown workload {name!r}{nearest(name, BUILT_IN)}; there are {', '.join(BUILT_IN)}, "
            'or a .jsonl file with lines {"prompt": text or token ids, "output_len": tokens}'
        )
    items = _from_file(path, encode)[:num_requests]
    return Workload(path.stem, seed or 0, tuple(items), warm_up)


def _from_file(path: Path, encode: Encode) -> list[Item]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"workload {path} cannot be read: {error}") from error
    items = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompt, output = record["prompt"], record["output_len"]
            ids = encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
            if isinstance(output, bool) or not isinstance(output, int) or output < 1:
                raise ValueError(f"output_len must be at least 1, got {output!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: {type(error).__name__}: {error}; a line is "
                '{"prompt": text or token ids, "output_len": tokens}'
            ) from error
        items.append(Item(ids, output))
    if not items:
        raise ConfigError(f"workload {path} holds no requests")
    return items


def _token_ids(value: Sequence[object]) -> list[int]:
    ids = [t for t in value if isinstance(t, int) and not isinstance(t, bool)]
    if not ids or len(ids) != len(value):
        raise ValueError("prompt must be text or a non-empty list of token ids")
    return ids
