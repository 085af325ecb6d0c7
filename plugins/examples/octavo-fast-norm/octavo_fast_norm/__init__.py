"""What Octavo asks this package: which op of which backend it replaces, and when."""

from octavo.plugins import Capabilities, OpOverride, hookimpl


def suits(device: str, capabilities: Capabilities) -> bool | str:
    """Asked once per engine; text is the reason not to take part."""
    if "float32" not in capabilities.dtypes:
        return "this norm computes in float32"
    return True


@hookimpl
def octavo_ops() -> list[OpOverride]:
    # The kernel is named, not imported: this module is loaded by every `octavo` command.
    return [
        OpOverride(backend="cpu", op="rms_norm", make="octavo_fast_norm.kernel:Norm", when=suits)
    ]
