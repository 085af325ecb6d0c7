"""The pool of host memory that KV blocks are swapped to, as `--swap-space` asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core import memory
from octavo.core.config import ConfigError, EngineConfig
from octavo.core.contract import Handle, Ops
from octavo.core.host_pool import HostPool
from octavo.core.swap import Swap

if TYPE_CHECKING:
    from octavo.core.blocks import BlockManager
    from octavo.core.entry.design import Design
    from octavo.core.host_store import HostStore

_GIB = 1 << 30


def host_bytes(config: EngineConfig, made: Design, left: int) -> tuple[int, bool]:
    """(bytes of the pool, 0 if none is asked for; whether they are of the device's own memory).

    left: of the device's memory, beside weights and KV cache.

    Raises:
        ConfigError: this device cannot move blocks, or the host has too little memory.
    """
    wanted = int(config.swap_space * _GIB)
    if not wanted:
        return 0, False
    backend, device = made.resolved.backend, made.resolved.device
    who = f"backend {backend.name!r} on {device}"
    if not backend.capabilities(device).swap:
        raise ConfigError(
            f"--swap-space {config.swap_space:g}: {who} cannot move KV blocks to host memory (its "
            "capabilities say no swap); leave it out: preempted requests are computed again"
        )
    host = memory.host_memory()
    shared = backend.memory(device).total == host.total  # the device's memory is the host's
    free = min(host.free, left) if shared else host.free
    if wanted > free:
        beside = " beside weights and KV cache" if shared else ""
        raise ConfigError(
            f"--swap-space {config.swap_space:g}: {wanted:,} bytes of host memory, {free:,} are "
            f"free{beside}; use at most {int(free / _GIB * 100) / 100:g}"
        )
    return wanted, shared


@dataclass(frozen=True)
class HostMemory:
    """The pool's bytes, and what is known of copying to it."""

    store: HostStore
    num_slots: int
    row_bytes: int
    block_seconds: float
    taken: int  # bytes of the device's memory, where that is the host's

    def swap(self, blocks: BlockManager, mode: str) -> Swap:
        """What decides over it."""
        pool = HostPool(self.num_slots)
        return Swap(blocks, pool, mode, self.block_seconds)

    @property
    def note(self) -> str:
        """What was measured, in words."""
        return (
            f"host memory holds {self.num_slots} KV blocks; a block takes "
            f"{self.block_seconds * 1e3:.2f} ms there and back"
        )


def make_host_memory(
    config: EngineConfig, made: Design, ops: Ops, kv: list[Handle], num_blocks: int, left: int
) -> tuple[HostMemory | None, list[Handle]]:
    """(the pool, None where none is asked for; the KV handles to use from now on).

    Raises:
        ConfigError: as `host_bytes`, or it does not hold a block.
    """
    wanted, shared = host_bytes(config, made, left)
    if not wanted:
        return None, kv
    from octavo.core.host_store import HostStore, measured, row_bytes

    each = row_bytes(ops, kv)
    if wanted < each:
        raise ConfigError(
            f"--swap-space {config.swap_space:g}: a KV block takes {each:,} bytes; give at least "
            f"{each / _GIB:.2g} (GiB)"
        )
    seconds, kv = measured(ops, kv, num_blocks)
    slots = wanted // each
    store = HostStore(ops, slots, each, made.plan.block_size)
    return HostMemory(store, slots, each, seconds, slots * each * shared), kv
