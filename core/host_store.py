"""The bytes of a host pool's slots, and the copies that a plan lists between them and a KV cache."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import torch

from octavo.core.contract import Handle, Ops, Transfer, handle_of
from octavo.core.types import StepPlan

_AT_ONCE = 16 << 20  # bytes of a single transfer
_TRIED = 8  # blocks by which copies are measured
_TRIALS = 3


class HostStore:
    """One row of bytes for each slot.

    Args:
        ops: of the device whose blocks come here.
        row_bytes: of a block, all layers.
        block_size: tokens of a block.
    """

    def __init__(self, ops: Ops, num_slots: int, row_bytes: int, block_size: int) -> None:
        self._ops = ops
        # As numpy's, whose copies wake no threads: torch's would take longer to wake than they save.
        self._rows = np.empty((num_slots, row_bytes), np.uint8)
        self._block_size = block_size
        self._at_once = max(1, _AT_ONCE // row_bytes)
        self._under_way: list[tuple[Transfer, list[int], list[int]]] = []  # slots, their rows in it

    def start(self, step: StepPlan, kv: list[Handle]) -> None:
        """Begins to copy what a step sends here. Returns once the step may write what it writes."""
        self._forget()
        if not step.swap_out:
            return
        blocks = list(dict.fromkeys(block for block, _ in step.swap_out))
        for at in range(0, len(blocks), self._at_once):
            some = blocks[at : at + self._at_once]
            row = {block: i for i, block in enumerate(some)}
            slots = [slot for block, slot in step.swap_out if block in row]
            rows = [row[block] for block, _ in step.swap_out if block in row]
            found = self._ops.export_blocks(kv, some)
            if isinstance(found, torch.Tensor):
                self._keep(found, slots, rows)
            else:
                self._under_way.append((found, slots, rows))
        # Most often a block leaves because the same step writes another's tokens into it.
        if self._under_way and not self._written(step).isdisjoint(blocks):
            self.finish()

    def bring(self, step: StepPlan, kv: list[Handle]) -> list[Handle]:
        """Copies what a step takes back from here. Returns the handles to use from now on."""
        if step.swap_in and self._under_way:
            self.finish()
        for at in range(0, len(step.swap_in), self._at_once):
            some = step.swap_in[at : at + self._at_once]
            rows = torch.from_numpy(self._rows[[slot for slot, _ in some]])
            found = self._ops.import_blocks(rows, kv, [block for _, block in some])
            kv = handle_of("import_blocks", found)
        return kv

    def finish(self) -> None:
        """Waits for all that is under way."""
        for transfer, slots, rows in self._under_way:
            self._keep(transfer.wait(), slots, rows)
        self._under_way.clear()

    def _keep(self, found: torch.Tensor, slots: list[int], rows: list[int]) -> None:
        data = found.numpy()
        for slot, row in zip(slots, rows, strict=True):
            self._rows[slot] = data[row]

    def _forget(self) -> None:
        """What a step that failed has left under way is in nobody's slot."""
        for transfer, *_ in self._under_way:
            with suppress(Exception):
                transfer.wait()
        self._under_way.clear()

    def _written(self, step: StepPlan) -> set[int]:
        """The blocks that a step writes."""
        written = {block for _, block in step.swap_in} | {target for _, target in step.copies}
        for item in step.items:
            first = item.start // self._block_size
            last = (item.start + item.count - 1) // self._block_size
            written.update(item.sequence.block_table[first : last + 1].tolist())
        return written


def row_bytes(ops: Ops, kv: list[Handle]) -> int:
    """Bytes of a block of all layers, as the device exports it."""
    return _on_host(ops.export_blocks(kv, [0])).shape[1]


def measured(ops: Ops, kv: list[Handle], num_blocks: int) -> tuple[float, list[Handle]]:
    """(seconds that a block takes to the host and back, the handles to use from now on), over a cache that
    holds nothing yet."""
    ids = list(range(1, min(num_blocks, _TRIED + 1)))
    best = float("inf")
    with torch.inference_mode():
        for _ in range(_TRIALS):
            begun = time.perf_counter()
            rows = _on_host(ops.export_blocks(kv, ids))
            kv = handle_of("import_blocks", ops.import_blocks(rows, kv, ids))
            _on_host(ops.export_blocks(kv, ids[:1]))  # which waits for the import
            best = min(best, (time.perf_counter() - begun) / len(ids))
    return best, kv


def _on_host(found: torch.Tensor | Transfer) -> torch.Tensor:
    return found if isinstance(found, torch.Tensor) else found.wait()
