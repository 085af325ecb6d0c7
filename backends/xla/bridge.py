"""All that is asked of torch_xla, in one place: another PyTorch for XLA needs this file again and no other.

Tensors on the device are lazy: an operation only notes what is to be done. `Captured` turns what was noted into a
program that is compiled once and then called with other tensors of the same shapes, without noting anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_builder as xla_builder
import torch_xla.core.xla_model as xla_model
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as sharding
import torch_xla.runtime as runtime
from torch_xla import _XLAC
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from octavo.core.config import ConfigError

Tensors = Sequence[torch.Tensor]


def start(kind: str, exact: bool = False, chips: int = 1) -> str:
    """Starts PJRT for a device kind, "CPU" or "TPU", and returns the torch device. Once in a process: later
    calls must name the same kind and number of chips. exact: float32 products in float32, also on a chip with a
    shorter format for them. chips: devices that one program runs on; the torch device stands for all of them.

    Raises:
        ConfigError: it has no such device, or the process already uses another kind or number.
    """
    global _mesh
    asked = f"{kind} x {chips}"
    if (running := _started()) is not None and running != asked:
        raise ConfigError(
            f"this process already runs XLA on {running}, and can have one kind and number of devices only: "
            f"use another process for {asked}"
        )
    if running is None:
        runtime.set_device_type(kind)
        _keep_jax_off_the_device()
        if chips > 1:
            _mesh = _line_of(chips, kind)
    if exact:
        _XLAC._xla_set_mat_mul_precision("highest")  # the public form warns at every call
    try:
        return str(torch_xla.device())
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"XLA has no {kind} device here: {reason}") from error


def _started() -> str | None:
    if not _XLAC._xla_runtime_is_initialized():
        return None
    return f"{runtime.device_type()} x {chips()}"


def _keep_jax_off_the_device() -> None:
    """jax only writes kernels here. A chip can be held once, and torch_xla holds it."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def memory() -> tuple[int, int] | None:
    """(bytes in all, bytes in use) of the device, or None where the runtime does not know."""
    try:
        info = xla_model.get_memory_info(torch_xla.device())
    except RuntimeError:
        return None
    return (int(info["bytes_limit"]), int(info["bytes_used"])) if info.get("bytes_limit") else None


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors made inside can be viewed and used anywhere: torch_xla's of inference mode cannot."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def upload(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the device, where it may be already."""
    return tensor.to(torch_xla.device())


def forget() -> None:
    """Drops whatever has been noted and not run."""
    _XLAC._clear_pending_irs(str(torch_xla.device()))


def run_noted() -> None:
    """Starts whatever has been noted."""
    torch_xla.sync()


def settle() -> None:
    """Runs whatever has been noted, and waits for it."""
    run_noted()
    xla_model.wait_device_ops()


def compilations() -> int:
    """Programs that XLA has compiled in this process."""
    found = metrics.metric_data("CompileTime")
    return int(found[0]) if found else 0


def fallbacks() -> list[str]:
    """Operations that ran on the host because XLA had none for them. Should be empty."""
    return sorted({str(name) for name in metrics.counter_names() if str(name).startswith("aten::")})


class Captured:
    """A function of device tensors as one compiled program.

    Args:
        fn: pure; device tensors in, device tensors out.
        args: tensors of the shapes that it will be called with.
        donated: places in `args` whose memory the results may take over: whoever calls the program must not use
            those tensors again.
    """

    def __init__(
        self, fn: Callable[..., Tensors], args: Tensors, donated: Sequence[int] = ()
    ) -> None:
        settle()
        # By their memory: a tensor that is cut is another one after it was, of the same memory.
        places = {at: i for i, at in enumerate(_XLAC._get_tensors_handle(list(args)))}
        results = list(fn(*args))
        _, leaves = _XLAC._get_tensors_xla_device_data_node(results)
        # Of a parameter that is none of `args`, the value it had when captured: a constant.
        self._inputs: list[int | torch.Tensor] = [
            places.get(at, leaf)
            for at, leaf in zip(_XLAC._get_tensors_handle(leaves), leaves, strict=True)
        ]
        for place in donated:
            _XLAC._set_buffer_donation(args[place], True)
        with alias_with_buffer_donor_config():
            self._hash = _XLAC._get_graph_hash(results)
            _XLAC._xla_warm_up_cache(results, [])
        self.constants = [i for i in self._inputs if not isinstance(i, int)]
        forget()

    def __call__(self, args: Tensors) -> list[torch.Tensor]:
        inputs = [args[i] if isinstance(i, int) else i for i in self._inputs]
        results: list[torch.Tensor] = _XLAC._run_cached_graph(self._hash, inputs)
        return results


def stablehlo(fn: Callable[..., Tensors], args: Tensors) -> str:
    """What `Captured` would compile, as StableHLO text. Its parameters are `args` in some order."""
    settle()
    text = str(xla_model.get_stablehlo(list(fn(*args))))
    forget()
    return text


# ------------------------------------------------------------------------------ several chips as one


_mesh: Any = None
"""The devices that every program runs on, where they are several."""


def _line_of(size: int, kind: str) -> Any:
    """`size` devices as one line, over which tensors can be cut. Before anything else is done with XLA."""
    runtime.use_spmd()
    if (found := runtime.global_runtime_device_count()) < size:
        raise ConfigError(f"XLA has {found} {kind} devices here, and {size} were asked for")
    return sharding.Mesh(np.arange(size), (size,), ("model",))


def chips() -> int:
    """Devices that a program runs on."""
    return 1 if _mesh is None else int(_mesh.size())


def cut(tensor: torch.Tensor, axis: int | None) -> torch.Tensor:
    """The tensor with `axis` cut over the devices in even parts; with None, or where it does not divide, each has all
    of it. On one device, the tensor itself."""
    if _mesh is not None:
        whole = axis is None or tensor.shape[axis] % chips() != 0
        axes = tuple("model" if i == axis and not whole else None for i in range(tensor.dim()))
        sharding.mark_sharding(tensor, _mesh, axes)
    return tensor


def _on_each(
    fn: Callable[..., torch.Tensor],
    args: Tensors,
    axes: Sequence[int | None],
    result: tuple[Sequence[int], int | None],
) -> torch.Tensor:
    """fn, on every device of its own parts of `args`, which are cut along `axes`. result: the whole result's shape,
    and the axis along which the devices' results are put together."""

    def spec(count: int, axis: int | None) -> tuple[str | None, ...]:
        return tuple("model" if i == axis else None for i in range(count))

    parts = []
    for arg, axis in zip(args, axes, strict=True):
        sharding.mark_sharding(arg, _mesh, spec(arg.dim(), axis))
        parts.append(_XLAC._spmd_full_to_shard_shape(arg))
    mine = fn(*parts)
    shape, axis = result
    _XLAC._mark_manual_sharding(mine, _XLAC.OpSharding([], [], [], sharding.ShardingType.MANUAL))
    whole = _mesh.get_op_sharding(spec(len(shape), axis))
    joined: torch.Tensor = _XLAC._spmd_shard_to_full_shape(mine, whole, list(shape), mine.dtype)
    return joined


def cut_as(tensor: torch.Tensor) -> str:
    """How a tensor is cut, in XLA's words."""
    return str(_XLAC._get_xla_sharding_spec(tensor))


# ---------------------------------------------------------------------------- kernels written in jax


class Kernel:
    """A function of jax arrays with one result as an operation on device tensors, lowered once for each set of shapes.

    Args:
        platform: "tpu" or "cpu", what it is lowered for. It need not be there.
    """

    def __init__(self, fn: Callable[..., Any], platform: str) -> None:
        self._fn, self._platform = fn, platform
        self._lowered: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def on_each(
        self,
        args: Tensors,
        axes: Sequence[int | None],
        shape: Sequence[int],
        axis: int | None,
    ) -> torch.Tensor:
        """The kernel on each chip, of its own part: no partitioner looks into a kernel. axes: along which each of `args`
        is cut; None: every chip sees all of it. shape, axis: the whole result's, and along which it is cut."""
        if _mesh is None:
            whole: torch.Tensor = self(*args)
            return whole
        return _on_each(self, args, axes, (shape, axis))

    def __call__(self, *args: torch.Tensor) -> Any:
        key = tuple((tuple(a.shape), a.dtype) for a in args)
        if key not in self._lowered:
            self._lowered[key] = self._lower(args)
        return self._lowered[key](*args)

    def _lower(self, args: Tensors) -> Callable[..., Any]:
        import jax
        from jax._src.interpreters import mlir

        shapes = [jax.ShapeDtypeStruct(tuple(a.shape), _jax_dtypes()[a.dtype]) for a in args]
        # A libtpu reads kernels written for export, whichever release of jax wrote them.
        lowered = (
            jax.jit(self._fn, keep_unused=True)
            .trace(*shapes)
            .lower(
                lowering_platforms=(self._platform,),
                _private_parameters=mlir.LoweringParameters(for_export=True),
            )
        )
        module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
        computation = xla_builder.computation_from_module_proto("octavo_kernel", module)
        call = xla_builder.xla_computation_as_func(computation, "octavo_kernel")
        return lambda *given: call(list(given))[0]


@cache
def _jax_dtypes() -> dict[torch.dtype, Any]:
    import jax.numpy as jnp

    return {
        torch.float32: jnp.float32,
        torch.bfloat16: jnp.bfloat16,
        torch.float16: jnp.float16,
        torch.int32: jnp.int32,
        torch.int64: jnp.int64,
    }
