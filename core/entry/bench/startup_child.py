"""What `octavo generate` does up to its first token, with the time of each part: one fresh process of
`octavo bench startup`. Engine options in, one line of JSON out."""

from __future__ import annotations

import time

BEGUN = time.monotonic()  # before anything else is imported; the clock is the parent's too

import argparse  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

from octavo.core.config import prepare_thread_environment  # noqa: E402
from octavo.core.entry.cli.options import add_engine_options, engine_config  # noqa: E402

PROMPT = "The first letters of the alphabet are"


def main(arguments: list[str]) -> None:
    """Prints begun, imported, loaded and first_token (`time.monotonic()` seconds) and the engine's
    own phases (seconds)."""
    prepare_thread_environment()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_options(parser)
    config = engine_config(parser.parse_args(arguments))
    from octavo.core.entry.llm import LLM
    from octavo.core.params import SamplingParams

    found: dict[str, Any] = {"begun": BEGUN, "imported": time.monotonic()}
    with LLM.from_config(config) as llm:
        found["loaded"] = time.monotonic()
        for _ in llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=1)):
            found["first_token"] = time.monotonic()
        found["phases"] = dict(llm.info.phases)
        found["model"] = f"{llm.info.name} ({llm.info.device}, {llm.info.numbers})"
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
