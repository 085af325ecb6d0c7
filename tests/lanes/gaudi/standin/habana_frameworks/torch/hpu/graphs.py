"""HPU graphs: what was dispatched between begin and end, dispatched again at the same addresses.

A replay repeats the recorded operations on the tensors of the capture and puts results where the capture had
put them. So what a caller reads from Python during the capture is frozen, as on the device, and so is a
tensor that it hands over later instead of copying into the captured one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from habana_frameworks.torch.standin import calls


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        devices = {t.device.type for t in _tensors((args, kwargs, out)) if t.dim()}
        if "_local_scalar_dense" in str(func) or devices == {"hpu", "cpu"}:
            raise RuntimeError(f"{func} is not supported during HPU Graph capturing")
        self.steps.append((func, args, kwargs, _tensors(out)))
        return out


class HPUGraph:
    def __init__(self) -> None:
        self._recorder = _Recorder()

    def capture_begin(self, dry_run: bool = False) -> None:
        calls["hpu_graph_capture"] += 1
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)

    def replay(self, asynchronous: bool = False) -> None:
        calls["hpu_graph_replay"] += 1
        for func, args, kwargs, results in self._recorder.steps:
            for old, new in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class graph:
    def __init__(self, hpu_graph: HPUGraph, stream: Any = None) -> None:
        self._graph = hpu_graph

    def __enter__(self) -> None:
        self._graph.capture_begin()

    def __exit__(self, *error: Any) -> None:
        self._graph.capture_end()
