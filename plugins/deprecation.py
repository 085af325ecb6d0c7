"""What of the contract is on its way out, and who still uses it.

The rule: a hook, method or field that goes is listed here by minor release N of the contract and works
as before, with a warning that names what to use instead, as long as N is the newest. N + 1 may take it
away. docs/plugins/changes.md says what each release brought, deprecated and removed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octavo.core.contract import Backend, Ops


@dataclass(frozen=True, slots=True)
class Deprecation:
    """One name that goes.

    name: a hook ("octavo_models"), or a member of a class ("Ops.rotary", "Lane.exclusive").
    since: the contract version that lists it. instead: what to do, as the end of a sentence.
    """

    name: str
    since: tuple[int, int]
    instead: str

    def __str__(self) -> str:
        major, minor = self.since
        return (
            f"{self.name} is deprecated since contract {major}.{minor} and may be gone in "
            f"{major}.{minor + 1}: {self.instead}"
        )


DEPRECATED: tuple[Deprecation, ...] = ()
"""All that is on its way out now."""


def used_hooks(names: Iterable[str], deprecated: Iterable[Deprecation]) -> list[str]:
    """What to say of a plug-in that implements these hooks."""
    here = set(names)
    return [str(each) for each in deprecated if each.name in here]


def overridden(thing: Backend | Ops, deprecated: Iterable[Deprecation]) -> list[str]:
    """What to say of a backend or its ops that define deprecated members of the contract's class."""
    owner = Backend if isinstance(thing, Backend) else Ops
    said = []
    for each in deprecated:
        kind, _, member = each.name.partition(".")
        below = [c for c in type(thing).__mro__ if c is not owner and issubclass(c, owner)]
        own = member in getattr(thing, "__dict__", {})
        if kind == owner.__name__ and (own or any(member in c.__dict__ for c in below)):
            said.append(str(each))
    return said


def filled_in(data: Any, deprecated: Iterable[Deprecation]) -> list[str]:
    """What to say of a dataclass of the contract whose deprecated fields are not at their defaults;
    looks into tuples of others, as a plan's lanes."""
    said = []
    going = {each.name: each for each in deprecated}
    for field in dataclasses.fields(data):
        value = getattr(data, field.name)
        each = going.get(f"{type(data).__name__}.{field.name}")
        if each is not None and value != _default(field):
            said.append(str(each))
        for inner in value if isinstance(value, tuple) else ():
            if dataclasses.is_dataclass(inner):
                said += filled_in(inner, going.values())
    return list(dict.fromkeys(said))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
