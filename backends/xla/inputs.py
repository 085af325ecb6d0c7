"""A batch's arrays as XLA programs take them: int32, of sizes that the bucket alone decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from octavo.backends.xla import bridge
from octavo.core.types import Batch
from octavo.kernels.pallas import tiles
from octavo.kernels.pallas.tiles import Int32

GROUP = 8
"""Slots that a TPU writes together."""


class StepInputs:
    """What `prepare` makes of a batch, and what operations get as `meta`.

    An array is made when an operation asks for it, and uploaded by itself; or, inside a compiled program, it is a
    part of the one array that all of them go in (`flat`).
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.decode = batch.kind == "decode"
        self.key = (
            len(batch.token_ids),
            len(batch.context_lens),
            tuple(table.shape[1] for table in batch.block_tables),
            len(batch.logits_rows),
            self.decode,
        )
        self._hosts: dict[str, Int32] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._get: Callable[[str], torch.Tensor] = lambda name: bridge.upload(
            torch.from_numpy(self.host(name))
        )

    # ------------------------------------------------------------------ what the operations ask for

    @property
    def token_ids(self) -> torch.Tensor:
        """[T]."""
        return self.tensor("token_ids")

    @property
    def positions(self) -> torch.Tensor:
        """[T]."""
        return self.tensor("positions")

    @property
    def logits_rows(self) -> torch.Tensor:
        """[L]."""
        return self.tensor("logits_rows")

    def tensor(self, name: str) -> torch.Tensor:
        """An array by name, on the device."""
        if name not in self._tensors:
            self._tensors[name] = self._get(name)
        return self._tensors[name]

    # ----------------------------------------------------------------------------------- on the host

    def host(self, name: str) -> Int32:
        """An array by name: token_ids, positions, logits_rows; of KV group g slots.g, tables.g, groups.g.ids and
        groups.g.tokens; tiles.N.work, .rows and .row_of for tiles of N queries."""
        if name not in self._hosts:
            self._make(name)
        return self._hosts[name]

    def _make(self, name: str) -> None:
        batch, keep = self.batch, self._hosts
        kind, _, rest = name.partition(".")
        if kind in ("slots", "tables"):
            of_groups = batch.slots if kind == "slots" else batch.block_tables
            keep[name] = np.ascontiguousarray(of_groups[int(rest)], np.int32)
        elif kind == "groups":
            group = rest.partition(".")[0]
            ids, tokens = tiles.write_groups(
                self.host(f"slots.{group}"), len(batch.context_lens), GROUP
            )
            keep[f"groups.{group}.ids"], keep[f"groups.{group}.tokens"] = ids, tokens
        elif kind == "tiles":
            size = rest.partition(".")[0]
            cut = tiles.cut(batch.query_start, batch.context_lens, len(batch.token_ids), int(size))
            keep[f"tiles.{size}.work"] = np.stack((cut.seq, cut.first, cut.end))
            keep[f"tiles.{size}.rows"], keep[f"tiles.{size}.row_of"] = cut.rows, cut.row_of
        else:
            keep[name] = np.ascontiguousarray(getattr(batch, name), np.int32)

    # ------------------------------------------------------------------------- in a compiled program

    @property
    def asked_for(self) -> list[str]:
        """The arrays that operations have asked for so far."""
        return list(self._tensors)

    def flat(self, names: Sequence[str]) -> torch.Tensor:
        """The named arrays one after another, on the host."""
        return torch.from_numpy(np.concatenate([self.host(name).reshape(-1) for name in names]))

    def reading(self, names: Sequence[str], flat: torch.Tensor) -> StepInputs:
        """The same inputs, as parts of a device tensor laid out as `flat(names)` is."""
        places: dict[str, tuple[int, tuple[int, ...]]] = {}
        at = 0
        for name in names:
            array = self.host(name)
            places[name] = (at, array.shape)
            at += array.size

        def part(name: str) -> torch.Tensor:
            start, shape = places[name]
            return flat[start : start + int(np.prod(shape))].view(shape)

        reader = StepInputs(self.batch)
        reader._get = part
        return reader
