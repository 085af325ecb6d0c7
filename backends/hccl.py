"""Process groups over HCCL. Intel's and Huawei's libraries have the same name, and torch.distributed offers
each as backend "hccl" once the vendor's package is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError
from octavo.plugins import Communicator

if TYPE_CHECKING:
    import torch


class HcclCommunicator(Communicator):
    """A group of ranks, one device each. The vendor's package is imported before it is made.

    Args:
        group: has `rank`, `size` and `init_method`, the address at which the ranks meet.

    Raises:
        ConfigError: torch has no HCCL here, or the ranks do not find each other.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self.rank, self.size = int(group.rank), int(group.size)
        try:
            dist.init_process_group(
                "hccl", init_method=group.init_method, rank=self.rank, world_size=self.size
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"rank {self.rank} of {self.size} could not join the HCCL group at "
                f"{group.init_method}: {error}"
            ) from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, in place."""
        import torch.distributed as dist

        dist.all_reduce(x)
        return x

    def close(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
