"""One session for each lane of ci/lanes.py: `nox -s triton`, or `ci/lane triton`, which sums up too."""

from __future__ import annotations

import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "ci"))

import lane_session
from lanes import LANES, Lane

nox.needs_version = ">=2025.2.9"
nox.options.reuse_existing_virtualenvs = True


def _make(lane: Lane) -> None:
    project = lane.environment == "project"

    @nox.session(
        name=lane.name,
        python=False if project else None,
        venv_backend=None if project else "venv",
        venv_params=["--system-site-packages"] if lane.environment == "machine" else (),
        reuse_venv=True,
        default=lane.every,
        tags=["every" if lane.every else "on-demand"],
    )
    def session(session: nox.Session) -> None:
        lane_session.run(session, lane)

    session.__doc__ = lane.what


for _lane in LANES:
    _make(_lane)
