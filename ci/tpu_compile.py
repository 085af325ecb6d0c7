"""Compiles StableHLO for TPUs on a machine without one: libtpu's compiler, no device.

Needs jax and libtpu (ci/requirements/pallas.txt), and these variables before jax is imported, which libtpu reads
by itself: JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost ALLOW_MULTIPLE_LIBTPU_LOAD=1
"""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""Chips by name, with the smallest slice that libtpu describes."""


@dataclass(frozen=True)
class Compiled:
    """seconds: of the compile. code, temporary, aliased: bytes. kernels: custom calls in the compiled program. collectives:
    what chips say to each other in it."""

    chip: str
    seconds: float
    code: int
    temporary: int
    aliased: int
    kernels: int
    collectives: int


_COLLECTIVE = re.compile(
    r" (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


@cache
def _devices(chip: str) -> Sequence[Any]:
    from jax.experimental import topologies

    devices: Sequence[Any] = topologies.get_topology_desc(CHIPS[chip], "tpu").devices
    return devices


def stablehlo(
    fn: Callable[..., Any], *args: tuple[tuple[int, ...], Any], donate: int | None = None
) -> str:
    """`fn` lowered for TPUs, as text. args: shape and dtype of each; donate: the argument it may overwrite.

    Kernels are written in the oldest form their compiler still reads: a libtpu is older than its jax as a rule.
    """
    import jax
    from jax._src.interpreters import mlir

    shapes = [jax.ShapeDtypeStruct(*a) for a in args]
    jitted = jax.jit(fn, donate_argnums=() if donate is None else (donate,))
    lowered = jitted.trace(*shapes).lower(
        lowering_platforms=("tpu",), _private_parameters=mlir.LoweringParameters(for_export=True)
    )
    return str(lowered.compiler_ir("stablehlo"))


def compile_for(chip: str, text: str, partitions: int = 1) -> Compiled:
    """Compiles StableHLO text for `chip`, cut over `partitions` of its devices."""
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    devices = list(_devices(chip))[:partitions]
    client = devices[0].client
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=partitions,
        device_assignment=np.array([[d.id for d in devices]]),
        backend=client,
    )
    started = time.perf_counter()
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        executable = compiler.backend_compile_and_load(
            client, module, _device_list(devices), options, []
        )
    stats = executable.get_compiled_memory_stats()
    program = "\n".join(m.to_string() for m in executable.hlo_modules())
    return Compiled(
        chip,
        time.perf_counter() - started,
        stats.generated_code_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
        program.count('custom_call_target="tpu_custom_call"'),
        len(_COLLECTIVE.findall(program)),
    )


class Compiler:
    """`compile_for` in a process of its own, which is ended where a compilation takes longer than `limit` seconds:
    a compiler that hangs listens to nothing else."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        there.close()

    def __call__(self, chip: str, text: str, partitions: int = 1) -> Compiled:
        """Raises:
        TimeoutError: it took longer than `limit`.
        RuntimeError: the compiler refused it, or ended its process.
        """
        try:
            self._here.send((chip, text, partitions))
            if not self._here.poll(self.limit):
                raise TimeoutError(f"not compiled for {chip} after {self.limit:.0f} s")
            found: Compiled | str = self._here.recv()
        except (EOFError, OSError) as ended:
            self.close()
            code = self._process.exitcode
            self._start()
            if isinstance(ended, TimeoutError):
                raise
            raise RuntimeError(f"the compiler's process ended with code {code}") from ended
        if isinstance(found, str):
            raise RuntimeError(found)
        return found

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()
        self._here.close()


def _serve(calls: Any) -> None:
    while True:
        try:
            asked = calls.recv()
        except EOFError:
            return
        try:
            calls.send(compile_for(*asked))
        except Exception as error:  # of any kind: whoever asked is told
            calls.send(f"{type(error).__name__}: {error}")


def _device_list(devices: Sequence[Any]) -> Any:
    from jaxlib import _jax

    return _jax.DeviceList(tuple(devices))
