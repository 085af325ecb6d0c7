"""A GGUF file's tensors under the names, layout and values of the original safetensors.

llama.cpp's converter changes three things, each undone here: names; the row order of Llama's query
and key projections (rotary pairs interleaved there, split in halves here; Llama only); and Gemma's
norm weights, stored as 1 + w.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from octavo.core.loading.errors import WeightsError
from octavo.core.loading.files import drop_pages
from octavo.core.loading.gguf import GgufFile, GgufTensor
from octavo.core.loading.gguf_codes import GROUP, KEPT, int4_codes, kept_codes
from octavo.core.loading.gguf_config import config_of
from octavo.core.loading.gguf_dequant import dequantize

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from octavo.core.quantization.base import QuantizedTensor

_TOP = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Rotary tables: the configuration carries what they say.
_DERIVED = re.compile(r"^(rope_freqs|rope_factors_(long|short)|blk\.\d+\.attn_rot_embd)\.weight$")
_BLOCK = re.compile(r"^blk\.(\d+)\.([a-z_]+)\.(weight|bias)$")


class GgufWeights:
    """Weights of one GGUF file, dequantised to float32 when asked for.

    A tensor this engine has no name for keeps its GGUF name, so that the check of a model's names
    reports it. Not safe to use after ``close()``.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._arch = self._file.architecture
        self._config = config_of(self._file)
        self._sources = {
            self._hf_name(name): name for name in self._file.tensors if not _DERIVED.match(name)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by its name in the original model."""
        return {name: self._file.tensors[source].shape for name, source in self._sources.items()}

    def get(self, name: str) -> torch.Tensor:
        """One tensor as float32. Raises WeightsError for a name the file lacks."""
        raw, entry = self._raw(name)
        value = dequantize(raw, entry.type, entry.shape)
        heads = self._permuted_heads(entry.name)
        if heads:
            value = unpermute(value, heads)
        if self._arch == "gemma3" and name.endswith("norm.weight"):
            value = value - 1
        return value

    def forms(self) -> dict[str, str]:
        """The matrices whose type is a form's grid to the last bit, each with that form."""
        kinds = {name: self._file.tensors[source] for name, source in self._sources.items()}
        return {
            name: KEPT[entry.type]
            for name, entry in kinds.items()
            if entry.type in KEPT and len(entry.shape) == 2
        }

    def codes(self, name: str, form: str, group: int) -> QuantizedTensor | None:
        """A matrix in a canonical quantised form, when the file keeps it in that very grid.

        Raises WeightsError for a name the file lacks.
        """
        if group != GROUP or form not in ("int4", *KEPT.values()):
            return None
        raw, entry = self._raw(name)
        found = (int4_codes if form == "int4" else kept_codes)(raw, entry.type, entry.shape)
        heads = self._permuted_heads(entry.name)
        if found is not None and heads:
            import torch

            found = found.rows(unpermute(torch.arange(entry.shape[0]), heads))
        return found

    def _raw(self, name: str) -> tuple[torch.Tensor, GgufTensor]:
        import numpy as np
        import torch

        if name not in self._sources:
            raise WeightsError(f"{self._file.path} holds no tensor for {name!r}")
        entry = self._file.tensors[self._sources[name]]
        # By way of numpy, whose array keeps the mapping alive; torch.frombuffer would let close()
        # unmap a tensor that is still in use.
        view = np.frombuffer(self._file.data, np.uint8, entry.nbytes, entry.offset)
        return torch.from_numpy(view), entry

    def _permuted_heads(self, source: str) -> int:
        """Heads whose rows the converter has reordered; 0: none."""
        if self._arch != "llama" or not (".attn_q." in source or ".attn_k." in source):
            return 0
        key = "num_attention_heads" if ".attn_q." in source else "num_key_value_heads"
        return int(self._config[key])

    def release(self, name: str) -> None:
        """Let the memory of a tensor's blocks go; it can be got again."""
        if name in self._sources:
            entry = self._file.tensors[self._sources[name]]
            drop_pages(self._file.data, entry.offset, entry.nbytes)

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

    def _hf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}"
        layer = _GEMMA_LAYER if self._arch == "gemma3" else _LAYER
        match = _BLOCK.match(name)
        if match is None or match[2] not in layer:
            return name
        return f"model.layers.{match[1]}.{layer[match[2]]}.{match[3]}"


def unpermute(value: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [heads * head_dim, …] from interleaved rotary pairs back to halves (llama.cpp's inverse)."""
    half = value.shape[0] // num_heads // 2
    pairs = value.view(num_heads, half, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)
