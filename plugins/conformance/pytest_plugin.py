"""Every check of the conformance kit as a test item, for a backend's own test suite:

    pytest --octavo-device=NAME

(`-p octavo.plugins.conformance.pytest_plugin` where plug-ins are not loaded by themselves.) Without the option it collects nothing. What a backend does not offer is skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

# Every pytest run loads this module where Octavo is installed, so what imports torch waits until asked for.
if TYPE_CHECKING:
    from octavo.plugins.conformance.case import Case
    from octavo.plugins.conformance.subject import Subject


def pytest_addoption(parser: pytest.Parser) -> None:
    """The kit's options."""
    group = parser.getgroup("octavo", "Octavo's conformance kit")
    group.addoption(
        "--octavo-device",
        metavar="NAME",
        help="check this backend or device word against Octavo's contract",
    )
    group.addoption("--octavo-full", action="store_true", help="more cases of each kind")
    group.addoption("--octavo-only", metavar="PATTERN", help="only checks whose id matches")


class Check(pytest.Item):
    """One case."""

    def __init__(self, *, case: Case, subject: Subject, **given: Any) -> None:
        super().__init__(**given)
        self._case, self._subject = case, subject

    def runtest(self) -> None:
        """Runs the case.

        Raises:
            CheckFailed: the backend failed it.
        """
        from octavo.plugins.conformance.run import run_case

        result = run_case(self._subject, self._case)
        if result.state == "failed":
            raise CheckFailed(result.detail)
        if result.state != "passed":
            pytest.skip(f"{result.state}: {result.detail}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What the kit says, and how to run it alone."""
        if not isinstance(excinfo.value, CheckFailed):
            return super().repr_failure(excinfo, style)
        command = f"octavo backend check {self._subject.word} --only '{self._case.id}'"
        return f"{excinfo.value}\nalone: {command}"

    def reportinfo(self) -> tuple[Any, None, str]:
        """The case's id as the name."""
        return self.path, None, self._case.id


class CheckFailed(AssertionError):
    """A backend does not keep the contract."""


class Checks(pytest.Collector):
    """All cases of one backend."""

    def collect(self) -> Iterator[pytest.Item]:
        """An item for each case that was asked for."""
        from octavo.core.config import prepare_thread_environment

        prepare_thread_environment()  # where nothing has imported torch yet
        from octavo.plugins.conformance.run import chosen, resolve
        from octavo.plugins.conformance.subject import Subject

        word = self.config.getoption("--octavo-device")
        full = bool(self.config.getoption("--octavo-full"))
        resolved = resolve(word)
        subject = Subject(resolved.backend, resolved.device, word, full)
        for case in chosen(subject, full, self.config.getoption("--octavo-only")):
            yield Check.from_parent(self, name=case.id, case=case, subject=subject)


def pytest_collection(session: pytest.Session) -> None:
    """With --octavo-device the kit's checks are all there is to collect, unless paths are named."""
    if session.config.getoption("--octavo-device") and session.config.args_source is not (
        pytest.Config.ArgsSource.ARGS
    ):
        session.config.args = []


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> Any:
    """Adds the checks behind the tests of the paths that were named."""
    if session.config.getoption("--octavo-device"):
        collector = Checks.from_parent(session, name="octavo")
        items.extend(collector.collect())
    return (yield)
