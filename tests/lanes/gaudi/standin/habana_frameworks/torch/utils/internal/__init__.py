"""Whether operations are gathered or launched at once."""

from habana_frameworks.torch.standin import lazy


def is_lazy() -> bool:
    return lazy[0]
