"""docs/api.md names every parameter that the server honours, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.core.entry.server.embeddings import EmbeddingRequest
from octavo.core.entry.server.protocol import NEUTRAL, ChatRequest, CompletionRequest


def test_every_parameter_is_in_the_document() -> None:
    document = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    named = set(re.findall(r"`(\w+)`", document))
    kinds = (ChatRequest, CompletionRequest, EmbeddingRequest)
    fields = {name for kind in kinds for name in kind.__struct_fields__}
    honoured = {f for f in fields - set(NEUTRAL) if not f.startswith("prompt_cache")} - {"model"}
    assert not honoured - named, honoured - named
