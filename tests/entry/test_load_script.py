"""The load script that docs/performance.md names counts what a server really sent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "fakes" / "load.py"


def test_it_counts_tokens_and_events(own_server: Any) -> None:
    server = own_server(NULL_ENGINE_STEP_SECONDS="0.001")
    server.wait_ready()
    words = [str(server.port), "--clients", "4", "--requests", "12", "--tokens", "16"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = {k: float(v) for k, v in re.findall(r"(\w+) ([\d.e+-]+)", done.stdout)}
    per_request = found["tokens_per_second"] / found["requests_per_second"]
    assert abs(per_request - 16) < 0.5
    assert 0 < found["events_per_second"] <= 1.2 * found["tokens_per_second"]
    assert 0 < found["first_byte_median"] <= found["first_byte_p99"]
