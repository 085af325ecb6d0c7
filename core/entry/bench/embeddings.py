"""Embeddings per second, beside transformers: one text at a time, and in padded batches.

Texts are cut from the committed English text, so their lengths are as mixed as those of documents.
transformers runs the same weights (the bytes of the same file) in float32 and pools the same way; in padded
batches in the order of the texts, and sorted by length as sentence-transformers does it. Each way is run as
often as asked for, in turn, and its best run counts: what a neighbour takes is taken from one run only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.entry.bench.workload import make_workload
from octavo.core.params import SamplingParams
from octavo.core.pooling import Pooling, PoolingKind
from octavo.core.types import Request

if TYPE_CHECKING:
    import torch

    from octavo.core.engine import Engine

BATCH = 32
LONGEST = 256
"""Tokens of a text, at most."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one way was in its best run."""

    name: str
    embeddings: int
    tokens: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Embeddings."""
        return self.embeddings / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of the texts, without padding."""
        return self.tokens / self.seconds


def texts(encode: Callable[[str], list[int]], count: int) -> list[list[int]]:
    """So many texts as token ids, none longer than `LONGEST`."""
    items = make_workload("sharegpt", encode, num_requests=count).items
    return [item.prompt_token_ids[:LONGEST] for item in items]


@contextmanager
def random_bert() -> Iterator[Path]:
    """A folder with a model of BERT-base's size and random weights, and a tokenizer of single bytes."""
    import tempfile

    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        transformers.BertModel(transformers.BertConfig()).save_pretrained(folder)
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
        backend = tokenizers.Tokenizer(
            tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>")
        )
        backend.save(str(folder / "tokenizer.json"))
        yield folder


def embedded(engine: Engine, ids: Sequence[list[int]], run: int) -> tuple[float, list[bytes]]:
    """Seconds that the engine takes for all texts at once, and their embeddings."""
    info = engine.info.embedding
    assert info is not None
    nothing = SamplingParams(max_tokens=0, temperature=0.0)
    requests = [
        Request(
            id=f"{run}/{i}",
            prompt_token_ids=each,
            params=nothing,
            pooling=Pooling(info.pooling),
            cache_salt=str(run),  # what an earlier run has cached does not count
        )
        for i, each in enumerate(ids)
    ]
    found: dict[str, bytes] = {}
    begun = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_unfinished():
        for update in engine.step():
            if update.embedding is None:
                raise RuntimeError(f"a text was not embedded: {update.stop_reason}")
            found[update.request_id] = update.embedding
    seconds = time.perf_counter() - begun
    return seconds, [found[request.id] for request in requests]


def by_transformers(
    model: Any, ids: Sequence[list[int]], kind: PoolingKind, batch: int, by_length: bool = False
) -> tuple[float, torch.Tensor]:
    """Seconds that transformers takes in batches of `batch`, and the embeddings [texts, H]."""
    import torch

    order = sorted(range(len(ids)), key=lambda i: -len(ids[i])) if by_length else range(len(ids))
    rows: dict[int, torch.Tensor] = {}
    places = list(order)
    begun = time.perf_counter()
    with torch.inference_mode():
        for at in range(0, len(places), batch):
            some = places[at : at + batch]
            longest = max(len(ids[i]) for i in some)
            tokens = torch.zeros(len(some), longest, dtype=torch.int64)
            mask = torch.zeros(len(some), longest, dtype=torch.int64)
            for row, i in enumerate(some):
                tokens[row, : len(ids[i])] = torch.tensor(ids[i])
                mask[row, : len(ids[i])] = 1
            hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
            pooled = pool(hidden, mask, kind)
            rows.update(zip(some, torch.nn.functional.normalize(pooled, dim=-1), strict=True))
    seconds = time.perf_counter() - begun
    return seconds, torch.stack([rows[i] for i in range(len(ids))])


def pool(hidden: torch.Tensor, mask: torch.Tensor, kind: PoolingKind) -> torch.Tensor:
    """Padded hidden states [B, T, H], mask [B, T] -> [B, H]."""
    import torch

    if kind == "cls":
        return hidden[:, 0]
    if kind == "last":
        return hidden[torch.arange(len(hidden)), mask.sum(1) - 1]
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def measure(
    engine: Engine, model: Any, ids: Sequence[list[int]], repeats: int
) -> tuple[list[Rate], float]:
    """All ways, Octavo first, and the largest difference of a number between it and transformers."""
    import torch

    info = engine.info.embedding
    assert info is not None
    embedded(engine, ids[:4], 0)
    ways: dict[str, Callable[[], tuple[float, torch.Tensor]]] = {
        "transformers, one at a time": lambda: by_transformers(model, ids, info.pooling, 1),
        f"transformers, batches of {BATCH}": lambda: by_transformers(
            model, ids, info.pooling, BATCH
        ),
        f"transformers, batches of {BATCH} by length": lambda: by_transformers(
            model, ids, info.pooling, BATCH, True
        ),
    }
    best: dict[str, float] = {}
    difference = 0.0
    for run in range(1, repeats + 1):
        seconds, mine = embedded(engine, ids, run)
        best["octavo"] = min(best.get("octavo", seconds), seconds)
        whole = torch.frombuffer(bytearray(b"".join(mine)), dtype=torch.float32).view(len(ids), -1)
        for name, way in ways.items():
            seconds, theirs = way()
            best[name] = min(best.get(name, seconds), seconds)
            difference = max(difference, float((whole - theirs).abs().max()))
    tokens = sum(map(len, ids))
    return [Rate(name, len(ids), tokens, seconds) for name, seconds in best.items()], difference


def table(rates: Sequence[Rate]) -> str:
    """One row for each way."""
    own = rates[0]
    lines = ["| | embeddings/s | tokens/s | Octavo is faster by |", "|---|---|---|---|"]
    lines += [
        f"| {rate.name} | {rate.per_second:.1f} | {rate.tokens_per_second:.0f} | "
        f"{own.per_second / rate.per_second:.2f}x |"
        for rate in rates
    ]
    return "\n".join(lines)
