"""GGUF blocks that are a canonical form's grid: their codes, taken over as they are.

In Q4_0 (scale, codes less 8), Q4_1 (scale, minimum) and Q4_K (eight scales and minima as multiples of
two) 32 inputs share a scale. Q4_1's numbers are float16 as the form's; Q4_0's minimum, -8 scales, is
exact in float16 too; those of Q4_K are rounded to it. Q8_0 and Q5_0 (codes less 16) have a float16 scale for 32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.loading.gguf_dequant import (
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q8_0,
    half,
    k_scales,
    nibbles,
    q5_0_codes,
    q8_0_codes,
)

if TYPE_CHECKING:
    import torch

    from octavo.core.quantization.base import QuantizedTensor

GROUP = 32
KEPT = {Q4_0: "codes4", Q4_1: "codes4", Q5_0: "codes8", Q8_0: "codes8"}
"""Types that a form holds exactly, each with the form."""

_WIDTHS = {Q4_0: 18, Q4_1: 20, Q4_K: 144}


def int4_codes(raw: torch.Tensor, kind: int, shape: tuple[int, ...]) -> QuantizedTensor | None:
    """Tensor `raw` (uint8 [nbytes]) of ggml type `kind` in the canonical form int4, or None when its
    type is of another grid or its scales do not fit a float16."""
    import torch

    from octavo.core.quantization.base import QuantizedTensor

    if kind not in _WIDTHS or len(shape) != 2:
        return None
    blocks = raw.view(-1, _WIDTHS[kind])
    codes = torch.empty(shape, dtype=torch.uint8)
    if kind == Q4_K:
        scales, offsets = k_scales(blocks)
        minima = -offsets
        nibbles(blocks[:, 16:].contiguous(), codes.view(-1, 4, 2, 32))
    elif kind == Q4_1:
        scales, minima = half(blocks, 0), half(blocks, 2)
        nibbles(blocks[:, 4:].contiguous(), codes.view(-1, 1, 2, 16))
    else:
        scales = half(blocks, 0)
        minima = -8 * scales
        nibbles(blocks[:, 2:].contiguous(), codes.view(-1, 1, 2, 16))
    grid = (shape[0], shape[1] // GROUP)
    small = [t.reshape(grid).half() for t in (scales, minima)]
    if any(not bool(t.isfinite().all()) for t in small):
        return None
    return QuantizedTensor("int4", codes, small[0], small[1], GROUP, torch.float32)


def kept_codes(raw: torch.Tensor, kind: int, shape: tuple[int, ...]) -> QuantizedTensor | None:
    """Tensor `raw` (uint8 [nbytes]) of ggml type `kind` in the form that KEPT names, or None when it has none or
    a minimum does not fit a float16."""
    import torch

    from octavo.core.quantization.base import QuantizedTensor

    if kind not in KEPT or len(shape) != 2:
        return None
    form = KEPT[kind]
    if form == "codes4":
        found = int4_codes(raw, kind, shape)
        if found is None:
            return None
        return QuantizedTensor(form, found.codes, found.scales, found.minima, GROUP, found.dtype)
    width, fill = (34, q8_0_codes) if kind == Q8_0 else (22, q5_0_codes)
    blocks, codes = raw.view(-1, width), torch.empty(shape, dtype=torch.int8)
    fill(blocks, codes.view(-1, GROUP))
    scales = half(blocks, 0).half().view(shape[0], shape[1] // GROUP)
    return QuantizedTensor(form, codes, scales, None, GROUP, torch.float32)
