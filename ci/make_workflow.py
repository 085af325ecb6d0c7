#!/usr/bin/env python3
"""Writes what is made from the table of lanes: the GitHub workflow, and the table in docs/lanes.md.

`--check` writes nothing, and ends with 1 if a file is not what it would write.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lanes import LANES, ROOT, Lane, every_run, table

WORKFLOW = ROOT / ".github/workflows/ci.yml"
PAGE = ROOT / "docs/lanes.md"
BEGIN, END = "<!-- lanes: made by ci/make_workflow.py -->", "<!-- /lanes -->"

_HEAD = """\
# Made by ci/make_workflow.py from ci/lanes.py: change those.
name: ci
on:
  push:
  pull_request:
  workflow_dispatch:
    inputs:
      lane:
        description: a lane that runs on demand
        type: choice
        options: [{choices}]
permissions:
  contents: read
jobs:
  test:
    if: github.event_name != 'workflow_dispatch'
    strategy:
      fail-fast: false
      matrix:
        os: [ubuntu-latest, ubuntu-24.04-arm]
    runs-on: ${{{{ matrix.os }}}}
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{ python-version: "3.11" }}
      - run: make test
      - run: ci/newcomer
"""

_LANES = """\
  {job}:
    if: {condition}
    strategy:
      fail-fast: false
      matrix:
        include:
{rows}
    name: ${{{{ matrix.lane }}}}
    runs-on: ${{{{ matrix.runner }}}}
    timeout-minutes: ${{{{ matrix.timeout }}}}
    steps:
      - uses: actions/checkout@v4
{python}      - if: matrix.system != ''
        run: sudo apt-get update && sudo apt-get install -y ${{{{ matrix.system }}}}
      - run: make setup
      - run: ci/lane ${{{{ matrix.lane }}}}
      - if: always()
        uses: actions/upload-artifact@v4
        with: {{ name: "lane-${{{{ matrix.lane }}}}", path: build/lanes }}
"""

_PYTHON = """\
      - uses: actions/setup-python@v5
        with: { python-version: "3.11" }
"""


def _timeout(lane: Lane) -> int:
    """Minutes after which a runner gives up: its environment is made there too."""
    return int(20 + 4 * lane.minutes)


def _row(lane: Lane) -> str:
    runner = ", ".join(lane.runner)
    return (
        f'          - {{ lane: {lane.name}, runner: [{runner}], system: "{" ".join(lane.system)}", '
        f"timeout: {_timeout(lane)} }}"
    )


def workflow() -> str:
    """The whole workflow file."""
    on_demand = [lane for lane in LANES if not lane.every]
    text = _HEAD.format(choices=", ".join(lane.name for lane in on_demand))
    text += _LANES.format(
        job="lanes",
        condition="github.event_name != 'workflow_dispatch'",
        rows="\n".join(map(_row, every_run())),
        python=_PYTHON,
    )
    for lane in on_demand:
        # Of its own, so that only the one asked for waits for a runner.
        text += _LANES.format(
            job=lane.name,
            condition=f"github.event_name == 'workflow_dispatch' && inputs.lane == '{lane.name}'",
            rows=_row(lane),
            # A chip's maker brings the Python that sees the chip.
            python=_PYTHON if lane.environment != "machine" else "",
        )
    return text


def page(text: str) -> str:
    """docs/lanes.md with the table as it must be."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE} has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def made() -> dict[Path, str]:
    """Each file that is made from the table, and its text."""
    return {WORKFLOW: workflow(), PAGE: page(PAGE.read_text("utf-8"))}


def main() -> int:
    stale = [path for path, text in made().items() if path.read_text("utf-8") != text]
    if sys.argv[1:] == ["--check"]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not made from ci/lanes.py: run ci/make_workflow.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(made()[path], "utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
