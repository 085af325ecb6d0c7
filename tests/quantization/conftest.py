"""Each kernel test runs once per instruction set that this machine has."""

import torch
from instruction_sets import isa

__all__ = ["isa"]

torch.manual_seed(0)
