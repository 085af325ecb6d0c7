"""Drawing tokens: what `kernels.pallas.draw` does, as torch_xla's tensors have it.

The numbers are those of `octavo.core.ops`: noise from (seed, counter, vocabulary id) alone. Probabilities are summed in
32 bits, so a token exactly at the border of top-p may be kept or dropped otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.backends.xla import bridge
from octavo.kernels.pallas import draw
from octavo.plugins import SampleInputs


def _low32(x: torch.Tensor) -> torch.Tensor:
    """The lower half of int64 as int32, whatever a conversion does with what does not fit."""
    half = x & 0xFFFFFFFF
    return torch.where(half > 0x7FFFFFFF, half - (1 << 32), half).to(torch.int32)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 as its upper and lower int32. The operator >> is a division in torch_xla."""
    return torch.bitwise_right_shift(x, 32).to(torch.int32), _low32(x)


def sample(
    logits: torch.Tensor, rows: SampleInputs, kernel: Callable[..., bridge.Kernel]
) -> torch.Tensor:
    """logits [L, V] -> tokens [L] int64, as `Ops.sample` says. kernel: makes an operation of a function in jax."""
    logits = logits.float()
    tokens: torch.Tensor
    if rows.all_greedy:
        tokens = kernel(draw.greedy)(logits)
    else:
        numbers = torch.stack((*_halves(rows.seed), *_halves(rows.counter)))
        tokens = kernel(draw.sample)(
            logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p, numbers
        )
    return tokens.long()
