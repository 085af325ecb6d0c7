"""A whole backend: it serves through Octavo's portable ops until it overrides one."""

from octavo.plugins import Backend, Probe, hookimpl


class ToyBackend(Backend):
    name = "toy"
    device_types = ("toy",)
    priority = -1  # only when asked for

    def probe(self) -> Probe:
        return Probe(devices=("toy",), details={"made of": "the CPU"})


@hookimpl
def octavo_backends() -> list[Backend]:
    return [ToyBackend()]
