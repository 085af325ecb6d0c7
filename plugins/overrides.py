"""One op of somebody else's backend, replaced: who claims it, who gets it, and how it is put in place.

All is decided once, when an engine is made. What comes out is the backend's own ops under a class of
one more level, so a replaced op costs a call no more than the backend's own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from octavo.core.config import ConfigError, nearest
from octavo.core.contract import Backend, Capabilities, Ops, fusion_stands

LAYOUT = frozenset(
    [
        "fuses",
        "supports",
        "kv_block_bytes",
        "alloc_kv",
        "kv_lost",
        "pack_weight",
        "weight_bytes",
        "packed_key",
        "store_packed",
        "load_packed",
        "tied_weight",
    ]
)
"""Methods that choose a layout which other ops read, or answer questions: only a backend has them."""

REPLACEABLE = frozenset(
    name
    for name, member in vars(Ops).items()
    if inspect.isfunction(member) and not name.startswith("_") and name not in LAYOUT
)
"""The ops that `OpOverride.op` may name."""

Make = Callable[[Ops, str], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class OpOverride:
    """A better body for one op of a backend that somebody else wrote; the answer of `octavo_ops`."""

    backend: str
    """The backend's name, as the second column of `octavo devices` has it."""

    op: str
    """The method of `Ops` that is replaced. Those that choose a layout cannot be: other ops read it."""

    make: str | Make
    """"module:attribute", or the thing itself: a function or class called once per engine with the
    backend's ops, free of any override, and the device word. What it returns is called instead of the op, with the op's
    arguments behind `self`. Handles, `meta` and packed weights are those of the backend."""

    priority: int = 0
    """Higher comes first where several plug-ins claim an op; equal ones go by the plug-in's name."""

    when: Callable[[str, Capabilities], bool | str] | None = None
    """Asked with the device word and the backend's capabilities: True to take part, False or the reason
    (as text) not to. Cheap, and imports nothing heavy. None: always."""

    keeps: tuple[str, ...] = ()
    """Larger ops of the backend (`Ops.fusions`) that stay on though they do this op's work without
    calling it. Each one not named here is switched off, or the override would never run."""


@dataclass(frozen=True, slots=True)
class Claim:
    """An override and the plug-in that brought it."""

    override: OpOverride
    plugin: str
    distribution: str

    def __str__(self) -> str:
        return f"{self.plugin} ({self.distribution})"


@dataclass(slots=True)
class ResolvedOps:
    """The ops an engine runs, and how they came about.

    sources: op -> who replaced it. off: larger op -> the smaller one that is replaced, so that it may not
    run. notes: what an operator should know, a sentence each. problems:
    overrides that should have run and could not. clashes: ops that several plug-ins would have taken.
    """

    ops: Ops
    sources: dict[str, Claim] = field(default_factory=dict)
    off: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    clashes: list[str] = field(default_factory=list)

    def told(self, capabilities: Mapping[str, str]) -> dict[str, str]:
        """`Capabilities.ops` with what replaced some of them."""
        off = {name: f"off, {op} is replaced" for name, op in self.off.items()}
        return {**capabilities, **off, **{op: str(claim) for op, claim in self.sources.items()}}


def validate(override: object) -> OpOverride:
    """The override, if it is one.

    Raises:
        ConfigError: it is something else, or names no op that can be replaced.
    """
    if not isinstance(override, OpOverride):
        raise ConfigError(f"octavo_ops gave {override!r}, which is no octavo.plugins.OpOverride")
    if override.op in LAYOUT:
        raise ConfigError(
            f"octavo_ops: {override.op!r} of {override.backend!r} cannot be replaced alone, other ops "
            "rely on what it chooses: bring a backend instead"
        )
    if override.op not in REPLACEABLE:
        raise ConfigError(
            f"octavo_ops: there is no op {override.op!r}{nearest(override.op, REPLACEABLE)}; "
            f"ops are {', '.join(sorted(REPLACEABLE))}"
        )
    return override


def clashes(claims: Sequence[Claim], backend: str | None = None) -> list[str]:
    """A sentence for each op of a backend that more than one plug-in claims."""
    found = []
    wanted = {(c.override.backend, c.override.op) for c in claims}
    for name, op in sorted(wanted):
        rivals = [c for c in ordered(claims) if (c.override.backend, c.override.op) == (name, op)]
        if len({c.plugin for c in rivals}) > 1 and backend in (None, name):
            who = ", ".join(f"{c.plugin} (priority {c.override.priority})" for c in rivals)
            found.append(
                f"op {op!r} of backend {name!r} is claimed by {who}; the first one that the device "
                f"suits gets it. --ops-from {rivals[-1].plugin} would choose another, --ops-from none neither"
            )
    return found


def ordered(claims: Sequence[Claim], choice: str = "auto") -> list[Claim]:
    """Claims in the order in which they are tried: by priority and name, or as `--ops-from` lists them.

    Raises:
        ConfigError: `choice` names a plug-in that replaces no op.
    """
    by_priority = sorted(claims, key=lambda c: (-c.override.priority, c.plugin))
    if choice == "auto":
        return by_priority
    if choice == "none":
        return []
    known = {c.plugin for c in claims}
    names = [name.strip() for name in choice.split(",")]
    for name in names:
        if name not in known:
            there = ", ".join(sorted(known)) or "none is installed"
            raise ConfigError(
                f"--ops-from {name!r}: no plug-in of that name replaces ops{nearest(name, known)}; "
                f"those that do: {there}"
            )
    return sorted(
        (c for c in by_priority if c.plugin in names), key=lambda c: names.index(c.plugin)
    )


def resolve_ops(
    backend: Backend, device: str, claims: Sequence[Claim], choice: str = "auto"
) -> ResolvedOps:
    """A backend's ops with the overrides that suit this device.

    Args:
        claims: all that are installed; those for other backends are passed over.
        choice: auto, none, or names of plug-ins with commas between, best first.

    Raises:
        ConfigError: `choice` names a plug-in that replaces no op, or the backend's own cannot be loaded.
    """
    tried = [c for c in ordered(claims, choice) if c.override.backend == backend.name]
    try:
        ops = backend.ops(device)
    except (ImportError, OSError) as error:  # its kernels or a driver's library are not there
        raise ConfigError(
            f"backend {backend.name!r} has no operations for {device!r}: {type(error).__name__}: {error} "
            "(--debug shows where)"
        ) from error
    # A backend may hand out one object again and again: earlier overrides must not pile up.
    base: type[Ops] = getattr(type(ops), "_octavo_base", type(ops))
    if type(ops) is not base:
        ops.__class__ = base
    found = ResolvedOps(ops)
    if not tried:
        return found
    capabilities = backend.capabilities(device)
    plain = copy.copy(ops)  # stays as it is, so that an override can call the op that it replaces
    bodies: dict[str, Callable[..., Any]] = {}
    for claim in tried:
        op, what = claim.override.op, f"{claim.override.op} of {claim}"
        if not hasattr(base, op) or (op == "decoder_layer" and not fusion_stands(base, op)):
            found.notes.append(f"{what} is not used: backend {backend.name!r} runs no {op}")
            continue
        try:
            refusal = _refusal(claim.override, device, capabilities)
            if refusal is not None:
                found.notes.append(f"{what} is not used: {refusal}")
            elif op in bodies:
                found.notes.append(f"{what} is not used: {found.sources[op].plugin} comes first")
                if choice == "auto" and found.sources[op].plugin != claim.plugin:
                    found.clashes += [
                        text for text in clashes(tried) if text.startswith(f"op {op!r} ")
                    ]
            else:
                bodies[op] = _made(claim.override, plain, device)
                found.sources[op] = claim
        except (Exception, SystemExit) as error:
            found.problems.append(f"{what} cannot be used: {type(error).__name__}: {error}")
    found.clashes = list(dict.fromkeys(found.clashes))
    if bodies:
        _put_in(found, base, bodies)
    return found


def _refusal(override: OpOverride, device: str, capabilities: Capabilities) -> str | None:
    """Why an override takes no part, or None."""
    if override.when is None:
        return None
    answer = override.when(device, capabilities)
    if answer is True:
        return None
    if answer is False:
        return f"not for {device}"
    if not isinstance(answer, str):
        raise TypeError(f"its `when` answered {answer!r}, neither a bool nor a reason")
    return answer


def _made(override: OpOverride, plain: Ops, device: str) -> Callable[..., Any]:
    make = override.make
    if isinstance(make, str):
        module, _, attribute = make.partition(":")
        make = getattr(import_module(module), attribute)
    body = make(plain, device)
    if not callable(body):
        raise TypeError(f"its `make` returned {body!r}, which cannot be called")
    return body


def _put_in(found: ResolvedOps, base: type[Ops], bodies: Mapping[str, Callable[..., Any]]) -> None:
    """Gives the ops a class in which the bodies stand, and decides which larger ops stay on."""
    offered = {name for owner in base.__mro__ for name in owner.__dict__.get("fusions", {})}
    kept: dict[str, tuple[str, ...]] = {}
    for name in sorted(offered):
        covered = next(
            o.__dict__["fusions"][name]
            for o in base.__mro__
            if name in o.__dict__.get("fusions", {})
        )
        replaced = [c for op, c in found.sources.items() if op in covered]
        if not replaced or not fusion_stands(base, name):
            continue
        if all(name in c.override.keeps for c in replaced):
            kept[name] = covered
        else:
            found.off[name] = which = ", ".join(
                c.override.op for c in replaced if name not in c.override.keeps
            )
            found.notes.append(
                f"{name} is off: it would do the work of {which} without calling the override"
            )
    namespace: dict[str, Any] = {op: staticmethod(body) for op, body in bodies.items()}
    namespace |= {"_octavo_base": base, "__module__": base.__module__}
    if kept:
        namespace["fusions"] = kept
    if "sample" in bodies:
        namespace["draws_finite"] = False  # what the backend promises of its own
    found.ops.__class__ = type(base.__name__, (base,), namespace)
