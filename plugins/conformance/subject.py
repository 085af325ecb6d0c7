"""The backend under test: its ops, its plans, and how numbers get there and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch

from octavo.core import config
from octavo.core.config import ConfigError
from octavo.core.ops import DTYPES
from octavo.core.quantization import FORMS, KEPT
from octavo.plugins import (
    Backend,
    Capabilities,
    ExecutionPlan,
    Inputs,
    KVSpec,
    Limits,
    ModelShape,
    Ops,
    PackedWeight,
    Probe,
    WeightSpec,
)
from octavo.plugins.conformance.case import Case, Dice, Finding, demand
from octavo.plugins.conformance.scorecard import execution_of
from octavo.plugins.conformance.truth import Array
from octavo.plugins.manager import plugins

FLOATS = config.DTYPES[1:]
"""Dtypes of weights, without "auto"."""

KV_DTYPES = config.KV_DTYPES[1:]

HEAD_SIZES = (64, 128, 32, 96, 80, 24, 16, 256, 40, 72, 8, 112, 192)
"""Head sizes that models have; more are drawn from what is declared."""

HEADS = ((4, 2), (4, 4), (6, 2), (8, 1), (9, 3), (5, 1), (12, 4), (16, 2), (7, 7))
"""(query heads, KV heads)."""

LIMITS = Limits(max_num_seqs=8, max_model_len=512, max_num_batched_tokens=256)

BRIEF_LIMITS = Limits(max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64)
"""Where the device's code is interpreted: each program takes milliseconds there."""


class Portable(Backend):
    """The portable ops on the host, which define what the engine's tokens are."""

    name = "portable"
    device_types = ("portable",)
    priority = -1

    def probe(self) -> Probe:
        return Probe(devices=("portable",))

    def capabilities(self, device: str) -> Capabilities:
        dtypes = ("float32", "float16", "bfloat16")
        return Capabilities(dtypes=dtypes, kv_dtypes=dtypes, quantization=("int8", "int4"))


def _known(backend: Backend, device: str) -> Capabilities:
    """A device's capabilities without the words that nobody knows. One check of the contract names them; all
    the others would stumble over each.

    Raises:
        ConfigError: no dtype is left to try.
    """
    told = backend.capabilities(device)
    dtypes = tuple(d for d in told.dtypes if d in FLOATS)
    kv_dtypes = tuple(d for d in told.kv_dtypes if d in KV_DTYPES)
    for name, known, some, all_of in (
        ("dtypes", dtypes, told.dtypes, FLOATS),
        ("kv_dtypes", kv_dtypes, told.kv_dtypes, KV_DTYPES),
    ):
        if not known:
            raise ConfigError(
                f"backend {backend.name!r} declares {name} {some}; they may be {', '.join(all_of)}"
            )
    forms = tuple(f for f in told.quantization if f in FORMS)
    kept = tuple(f for f in told.kept_codes if f in KEPT)
    return dataclasses.replace(
        told, dtypes=dtypes, kv_dtypes=kv_dtypes, quantization=forms, kept_codes=kept
    )


class Subject:
    """A backend on one device, started.

    Args:
        word: what `octavo backend check` was asked for, as its commands repeat it.
        device: the device word that the backend's methods take.
        batch_invariant: whether it is started, and its ops are chosen, as for --batch-invariant.
    """

    def __init__(
        self,
        backend: Backend,
        device: str,
        word: str = "",
        full: bool = False,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.backend, self.device, self.full = backend, device, full
        self.word = word or device
        self.capabilities = _known(backend, device)
        self.torch_device = backend.torch_device(device)
        self._activations: dict[str, torch.dtype] = {}
        self.brief = self._interpreted() and not full  # cases are to be few and small
        limits = BRIEF_LIMITS if self.brief else LIMITS
        self.limits = dataclasses.replace(limits, batch_invariant=batch_invariant)
        backend.start(device, self.limits)
        replaced = plugins().resolved_ops(backend, device, "none" if batch_invariant else "auto")
        self.ops = replaced.ops
        self.runs = replaced.told(self.capabilities.ops)  # op -> what runs it, as in an engine

    @cached_property
    def packages(self) -> tuple[str, ...]:
        """The packages that the backend's own code is in: where its author looks for an error."""
        kinds = (*type(self.backend).__mro__, *type(self.ops).__mro__)
        ours = ("octavo.core", "octavo.plugins", "builtins")
        modules = [k.__module__ for k in kinds if not k.__module__.startswith(ours)]
        tops = [m if m.startswith("octavo.") else m.partition(".")[0] for m in modules]
        return tuple(dict.fromkeys(tops))

    def _interpreted(self) -> bool:
        try:
            return execution_of(self.capabilities.notes, "") == "interpreted"
        except ValueError:  # a check of the contract has words for it
            return False

    @contextmanager
    def batch_invariant(self) -> Iterator[Subject]:
        """The backend started as for --batch-invariant, and at the end as it was."""
        try:
            yield Subject(self.backend, self.device, self.word, self.full, batch_invariant=True)
        finally:
            self.backend.start(self.device, self.limits)

    def size(self, usual: int, brief: int) -> int:
        """How much of something: a smaller number where cases are to be small."""
        return brief if self.brief else usual

    def static(self, fixed: Any, usual: Any) -> Any:
        """The first where every shape is a program that takes seconds to compile, and `full` was not asked."""
        return fixed if self.capabilities.shapes == "static" and not self.full else usual

    def execute(self, case: Case) -> Finding:
        """Runs a case's body as the engine runs a step: without autograd."""
        with torch.inference_mode():
            return case.body(self, case.dice())

    # ------------------------------------------------------------------------------- what it takes

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        return self.capabilities.dtypes

    @cached_property
    def portable(self) -> Ops:
        """The portable ops on the same torch device: what speed is measured against."""
        ops = Ops()
        ops.device = self.torch_device
        return ops

    def numbers(self) -> list[tuple[str, str]]:
        """(dtype, KV dtype) pairs to try: each of both at least once, or with --full all."""
        dtypes, kv_dtypes = self.capabilities.dtypes, self.capabilities.kv_dtypes
        pairs = {self.beside(d): None for d in dtypes}
        if not self.capabilities.kv_equals_dtype:
            pairs |= {
                (d, k): None for d in (dtypes if self.full else dtypes[:1]) for k in kv_dtypes
            }
        return list(pairs)

    def beside(self, dtype: str) -> tuple[str, str]:
        """The dtype and one of a KV cache beside it: the same, if there is such a cache."""
        kv_dtypes = self.capabilities.kv_dtypes
        return dtype, dtype if dtype in kv_dtypes else kv_dtypes[0]

    def head_size(self, dice: Dice) -> int:
        """One that is declared: as a rule one that models have."""
        low, high, step = self.capabilities.head_sizes
        usual = [s for s in HEAD_SIZES if not self.capabilities.refuses_head_size(s)]
        if usual and self.brief:
            return int(dice.choice([s for s in usual if s <= 80] or usual))
        if usual and dice.random() < 0.8:
            return int(dice.choice(usual))
        first = -(-low // step) * step
        choices = range(first, min(high, 256) + 1, step)
        return int(dice.choice(choices)) if choices else first

    def heads(self, dice: Dice) -> tuple[int, int]:
        """(query heads, KV heads)."""
        return HEADS[int(dice.integers(self.size(len(HEADS), 4)))]

    def block_size(self, dice: Dice) -> int:
        """One that is declared: as a rule a small one, where a context has many blocks."""
        sizes = [s for s in self.capabilities.block_sizes if s <= 256]
        sizes = sizes or list(self.capabilities.block_sizes)
        if self.brief:
            return int(dice.choice(sizes[:2]))
        return int(dice.choice(sizes[:3] if dice.random() < 0.7 else sizes))

    def plan(
        self,
        dtype: str,
        kv_dtype: str,
        *,
        block_size: int | None = None,
        heads: tuple[int, int] = (4, 2),
        head_size: int = 64,
        layers: int = 2,
        longest: int = 512,
        vocab: int = 101,
    ) -> ExecutionPlan:
        """The backend's own plan for a model of these sizes."""
        q_heads, kv_heads = heads
        shape = ModelShape(
            architecture="Llama",
            num_layers=layers,
            hidden_size=q_heads * head_size,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_size=head_size,
            vocab_size=vocab,
            max_position=max(longest, 2048),
            num_parameters=1 << 20,
            kv=(KVSpec(tuple(range(layers)), kv_heads, head_size, head_size, kv_dtype),),
        )
        limits = dataclasses.replace(
            self.limits,
            max_model_len=max(longest, self.limits.max_model_len),
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
        return self.backend.plan(shape, self.device, limits)

    def prepare(self, batch: Any) -> Inputs:
        return self.backend.prepare(batch, None, self.device)

    # ------------------------------------------------------------------------ numbers, there and back

    def activation(self, dtype: str) -> torch.dtype:
        """The dtype of activations beside weights of `dtype`: what the backend's embedding gives."""
        if dtype not in self._activations:
            spec = WeightSpec("probe", "embedding", (("probe", (8, 64)),))
            weight = self.ops.pack_weight({"probe": torch.zeros(8, 64)}, spec, dtype)
            ids = torch.zeros(4, dtype=torch.int64, device=self.torch_device)
            self._activations[dtype] = self.ops.embedding(ids, weight).dtype
        return self._activations[dtype]

    def tolerance_word(self, dtype: str) -> str:
        """The name of the activations' dtype."""
        kind = self.activation(dtype)
        return next(name for name, each in DTYPES.items() if each == kind)

    def put(self, values: Array, dtype: torch.dtype) -> torch.Tensor:
        """Numbers on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(dtype).to(self.torch_device)

    def ids(self, values: Any) -> torch.Tensor:
        """Whole numbers on the device, int64."""
        return torch.from_numpy(np.asarray(values, np.int64)).to(self.torch_device)

    def pack(self, values: Array, spec: WeightSpec, dtype: str) -> tuple[PackedWeight, Array]:
        """A weight of one part, and its numbers as the dtype holds them."""
        kept = rounded(values, DTYPES[dtype])
        part = torch.from_numpy(kept).to(DTYPES[dtype])
        return self.ops.pack_weight({spec.parts[0][0]: part}, spec, dtype), kept

    def settle(self, result: Any) -> None:
        """Waits until the device has computed a result."""
        if isinstance(result, (tuple, list)):
            for each in result:
                self.settle(each)
        elif isinstance(result, torch.Tensor) and result.device.type != "cpu":
            result.reshape(-1)[:1].cpu()


def get(tensor: torch.Tensor) -> Array:
    """A tensor's numbers on the host, float64."""
    result: Array = tensor.detach().cpu().double().numpy()
    return result


def given(what: str, result: Any, shape: Sequence[int], dtype: torch.dtype) -> Array:
    """A result's numbers. Raises Failed unless it is a tensor of this shape and dtype: the engine hands it to
    the next op as it is, where another dtype fails far from its cause.
    """
    demand(isinstance(result, torch.Tensor), f"{what} gave {type(result).__name__}, not a tensor")
    wanted = f"{tuple(shape)} of {str(dtype).removeprefix('torch.')}"
    got = f"{tuple(result.shape)} of {str(result.dtype).removeprefix('torch.')}"
    demand(got == wanted, f"{what} gave {got}; it must give {wanted}")
    return get(result)


def rounded(values: Array, dtype: torch.dtype) -> Array:
    """The numbers as a dtype holds them, in float64."""
    return get(torch.from_numpy(np.ascontiguousarray(values)).to(dtype))


def host_bytes(exported: Any) -> torch.Tensor:
    """What `export_blocks` gave as a tensor: at once, or what its transfer ends in."""
    found = exported if isinstance(exported, torch.Tensor) else exported.wait()
    result: torch.Tensor = found.cpu()
    return result


class Beside:
    """Rows [T, n] or [T, heads, n] on the device as a view of wider ones: other numbers lie between them.

    view: the rows.
    """

    OTHERS = 8

    def __init__(self, subject: Subject, values: Array, dtype: torch.dtype) -> None:
        others = np.full((len(values), self.OTHERS, *values.shape[2:]), 99.0)
        self._count = values.shape[1]
        self._whole = subject.put(np.concatenate([values, others], axis=1), dtype)
        self.view = self._whole[:, : self._count]

    def check(self, what: str) -> None:
        """Raises Failed where the numbers behind the rows are others now."""
        same = bool((get(self._whole[:, self._count :]) == 99.0).all())
        demand(same, f"{what} wrote behind the rows of a view, into what is not its own")


def strided(rows: torch.Tensor, parts: Sequence[int]) -> list[torch.Tensor]:
    """Views [T, n, D] of consecutive heads of rows [T, sum(parts), D], as the fused projection gives them."""
    return list(torch.split(rows, list(parts), dim=1))


def best_seconds(run: Callable[[], Any], settle: Callable[[Any], None], repeats: int = 5) -> float:
    """The shortest of some runs."""
    import time

    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        settle(run())
        best = min(best, time.perf_counter() - started)
    return best
