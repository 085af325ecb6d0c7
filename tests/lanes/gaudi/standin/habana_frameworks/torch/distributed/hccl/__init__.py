"""Importing it makes "hccl" a backend of `torch.distributed`: here gloo, behind copies to the host."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from habana_frameworks.torch.standin import calls, device


class _Hccl(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "hccl"

    def allreduce(self, tensors: list[Any], opts: Any = None) -> Any:
        calls["hccl_all_reduce"] += 1
        return self._gloo.allreduce([device().as_host(t) for t in tensors], opts)


dist.Backend.register_backend("hccl", _Hccl, devices=["hpu"])
