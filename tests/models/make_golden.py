"""Writes golden_smollm2.json: greedy tokens by transformers in float32, one prompt at a time.

    python tests/models/make_golden.py [NAME …]

Run it again when prompts.json changes, with names to renew or add only those prompts;
`test_golden_is_what_transformers_says` proves the file.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMPTS = HERE / "prompts.json"
GOLDEN = HERE / "golden_smollm2.json"
NUM_TOKENS = 64


def prompt_ids(tokenizer: Any, prompt: dict[str, Any]) -> list[int]:
    """The ids of one entry of prompts.json: a conversation, or a text to go on with."""
    if "messages" in prompt:
        ids: list[int] = tokenizer.encode_chat(prompt["messages"])
        return ids
    ids = tokenizer.encode(prompt["text"])
    return ids


def main(names: list[str]) -> None:
    import torch
    import transformers

    from octavo.core.config import EngineConfig
    from octavo.core.entry.bench.reference_model import greedy, load_transformers
    from octavo.core.entry.wiring import resolve_model
    from octavo.core.loading.tokenizer import load_tokenizer

    files = resolve_model(EngineConfig())
    tokenizer, model = load_tokenizer(files), load_transformers(files)
    kept = {}
    if names:
        kept = {e["name"]: e for e in json.loads(GOLDEN.read_text("utf-8"))["prompts"]}
    entries = []
    started = time.perf_counter()
    for prompt in json.loads(PROMPTS.read_text("utf-8")):
        ids = prompt_ids(tokenizer, prompt)
        if names and prompt["name"] not in names:
            entries.append(kept[prompt["name"]])
            continue
        result = greedy(model, ids, NUM_TOKENS, margins=True)
        entries.append(
            {
                "name": prompt["name"],
                "prompt": ids,
                "tokens": result.tokens,
                "margins": [float(f"{m:.3g}") for m in result.margins],
            }
        )
        print(f"{time.perf_counter() - started:6.1f} s  {len(ids):4d} tokens  {prompt['name']}")
    record = {
        "model": f"{files.origin} {files.version or ''}".strip(),
        "sha256": files.sha256,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "float32",
    }
    head = json.dumps(record)[1:-1]
    lines = ",\n".join(json.dumps(e, separators=(",", ":")) for e in entries)
    GOLDEN.write_text(f'{{{head},\n"prompts": [\n{lines}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
