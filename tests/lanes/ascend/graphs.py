"""`NPUGraph` without a device: what was dispatched in a capture, dispatched again at the same addresses.

The calls whose lengths may be changed are those that torch-npu itself lists, prepared for capture and changed by
its own handlers. All others keep every number that they were captured with.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from bodies import calls
from torch.utils._python_dispatch import TorchDispatchMode
from torch_npu.npu._npugraph_handlers.npugraph_handler import _NPU_GRAPH_OP_HANDLERS
from torch_npu.npu.graphs import _GraphDispatchRecord


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[_GraphDispatchRecord, Any, list[torch.Tensor]]] = []
        self.made: list[torch.Tensor] = []  # results that are no views of what was there before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "_local_scalar_dense" in str(func):
            raise RuntimeError(f"{func} synchronises: it cannot be captured")
        handler = _NPU_GRAPH_OP_HANDLERS.get(func.__name__)
        if handler is not None:
            func, args, kwargs = handler.prepare_capture(func, args, kwargs)
        out = func(*args, **kwargs)
        if handler is not None:
            out = handler.postprocess_result(out, kwargs)
        record = _GraphDispatchRecord(kwargs=kwargs, args=list(args), op_cache_entry=func)
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        made = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in given]
        self.made += made if handler is None else []
        self.steps.append((record, handler, _tensors(out)))
        return out


class NPUGraph:
    def __init__(self) -> None:
        self.recorder = _Recorder()
        self.auto_dispatch_capture = False

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        calls["graph_update"] += 1
        if not self.auto_dispatch_capture:
            raise RuntimeError("captured without auto_dispatch_capture")
        (given,) = cpu_update_input
        for record, handler, _ in self.recorder.steps:
            if handler is not None:
                for key, value in given.items():
                    if key in record.kwargs:
                        record.kwargs[key] = value
                handler.update_args(record, given)

    def replay(self) -> None:
        calls["graph_replay"] += 1
        for record, _, results in self.recorder.steps:
            out = record.op_cache_entry(*record.args, **record.kwargs)
            for old, new in zip(results, _tensors(out), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class graph:
    """A capture computes nothing: what it would have left behind is NaN."""

    def __init__(self, npu_graph: NPUGraph, auto_dispatch_capture: bool = False) -> None:
        self._graph = npu_graph
        npu_graph.auto_dispatch_capture = auto_dispatch_capture

    def __enter__(self) -> None:
        calls["graph_capture"] += 1
        self._graph.recorder.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._graph.recorder.__exit__(None, None, None)
        for t in self._graph.recorder.made:
            if t.is_floating_point():
                t.fill_(math.nan)
