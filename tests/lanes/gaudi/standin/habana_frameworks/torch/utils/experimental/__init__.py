"""Which chip it is."""

from enum import Enum

from habana_frameworks.torch.standin import generation


class synDeviceType(Enum):
    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type() -> synDeviceType:
    return synDeviceType[f"synDevice{generation[0]}"]
