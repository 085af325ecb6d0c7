"""What a step of a lane has to show, read from what it left behind."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree


@dataclass
class Result:
    """One run of a lane. count: tests, checks or whatever its steps count. seconds: on the clock, and
    of processors."""

    lane: str
    count: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.faults

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")


def read(path: Path) -> Result:
    """The inverse of `Result.write`."""
    return Result(**json.loads(path.read_text("utf-8")))


def of_junit(path: Path, skips: bool) -> tuple[int, list[str]]:
    """(tests that ran, faults) of a JUnit file by pytest. An expected failure is no skip."""
    if not path.exists():
        return 0, ["pytest wrote no results"]
    ran, faults = 0, []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            faults.append(f"{name} failed")
        elif skipped is None or skipped.get("type") == "pytest.xfail":
            ran += 1
        elif not skips:
            why = (skipped.text or "").strip() or skipped.get("message", "")
            faults.append(f"{name} was skipped: {why}")
    return ran, faults if ran or faults else ["no test ran"]


def of_scorecard(path: Path) -> tuple[int, list[str]]:
    """(checks that passed, faults) of a scorecard of the conformance kit."""
    if not path.exists():
        return 0, ["the conformance kit wrote no scorecard"]
    rows = json.loads(path.read_text("utf-8"))["rows"]
    faults = [f"{row['op']} {row['dtype']} failed" for row in rows if row["state"] == "failed"]
    passed = [row for row in rows if row["state"] == "passed"]
    for group in ("contract", "op", "engine"):
        if not any(row["group"] == group for row in passed):
            faults.append(f"the scorecard has no check passed in group {group!r}")
    return sum(row["cases"] for row in passed), faults


def of_output(text: str, proof: str) -> tuple[int, list[str]]:
    """(how many things were done, faults) of a script's output."""
    count = sum(int(number) for number in re.findall(proof, text))
    return count, [] if count else [f"the output counts nothing done: no {proof!r} in it"]


def junit(results: list[Result]) -> str:
    """The lanes as test cases of one JUnit suite."""
    suite = ElementTree.Element(
        "testsuite",
        name="lanes",
        tests=str(len(results)),
        failures=str(sum(not result.passed for result in results)),
        errors="0",
        skipped="0",
    )
    for result in results:
        case = ElementTree.SubElement(
            suite, "testcase", classname="lanes", name=result.lane, time=f"{result.seconds:.1f}"
        )
        if result.faults:
            ElementTree.SubElement(case, "failure", message=result.faults[0]).text = "\n".join(
                result.faults
            )
    return ElementTree.tostring(suite, encoding="unicode") + "\n"
