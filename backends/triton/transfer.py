"""Blocks on their way to the host, copied on a stream beside the one that computes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

STAGING_BYTES = 64 << 20
"""Device memory that an export holds at a time: two buffers of half this size take turns."""


@cache
def side_stream(device: torch.device) -> Any:
    """The stream that copies between host and device run on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class HostTransfer:
    """An export: `done()` says whether it is complete, `wait()` gives the blocks.

    host: uint8 [blocks, bytes]; event: recorded after the last copy, None when nothing is under way;
    keep: device memory that the copies read.
    """

    def __init__(self, host: torch.Tensor, event: Any, keep: list[torch.Tensor]) -> None:
        self._host, self._event, self._keep = host, event, keep

    def done(self) -> bool:
        """Whether the blocks are on the host."""
        if self._event is not None and self._event.query():
            self._finish()
        return self._event is None

    def wait(self) -> torch.Tensor:
        """The blocks, uint8 [blocks, bytes] on the host, once they are there."""
        if self._event is not None:
            self._event.synchronize()
            self._finish()
        return self._host

    def _finish(self) -> None:
        self._event = None
        self._keep.clear()
