"""The operations that mychip does better. Each one not defined here runs its portable torch body."""

from typing import Literal

import torch

from octavo.plugins import Ops


class MychipOps(Ops):
    def act_and_mul(
        self, x: torch.Tensor, kind: Literal["silu", "gelu", "gelu_tanh"]
    ) -> torch.Tensor:
        # x [T, 2n] -> act(x[:, :n]) * x[:, n:]. One op as a pattern for the others: do the case that
        # matters, and leave the rest to the portable body.
        if kind != "silu":
            return super().act_and_mul(x, kind)
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
