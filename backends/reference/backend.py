"""The reference backend: portable ops alone, on any torch device. The truth others are compared with."""

from __future__ import annotations

from importlib.util import find_spec

from octavo.core.config import ConfigError
from octavo.plugins import Backend, Capabilities, Limits, Probe


class ReferenceBackend(Backend):
    """`--device reference` runs on the CPU, `--device reference:cuda` on that torch device.

    It overrides nothing: what it computes is what `octavo.core.ops` says.
    """

    name = "reference"
    device_types = ("reference",)
    priority = -1  # never chosen by itself: right, not fast

    def probe(self) -> Probe:
        if find_spec("torch") is None:
            return Probe(reason="torch is not installed")
        return Probe(
            devices=("reference",), details={"runs on": "any torch device, as reference:cuda"}
        )

    def capabilities(self, device: str) -> Capabilities:
        dtypes = ("float32", "float16", "bfloat16")
        return Capabilities(
            dtypes=dtypes,
            kv_dtypes=dtypes,
            quantization=("int8", "int4"),
            swap=True,
            encoders=True,
            ops={"every op": "portable torch"},
        )

    def start(self, device: str, limits: Limits) -> None:
        import torch

        asked = self.torch_device(device)
        if asked.partition(":")[0] == "meta":
            raise ConfigError(f"--device {device!r}: torch's meta device holds no numbers")
        try:
            torch.empty(0, device=asked)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"--device {device!r}: torch cannot use device {asked!r} here: {reason}"
            ) from error
        if limits.threads is not None:
            torch.set_num_threads(limits.threads)
