"""Finds plug-ins by entry point and keeps a broken one from hurting the others."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from octavo.core.config import ConfigError, nearest
from octavo.core.contract import API_VERSION, Backend, Capabilities, ExecutionPlan, Probe
from octavo.plugins import deprecation, hookspecs
from octavo.plugins.overrides import Claim, ResolvedOps, clashes, resolve_ops, validate

if TYPE_CHECKING:
    from octavo.core.loading.files import ModelFiles

GROUP = "octavo"
FIRST_MAJOR = 1
"""Of the contract. An engine takes backends of its own major version and of the one before."""

HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("octavo_"))


@dataclass(frozen=True, slots=True)
class Problem:
    """A plug-in, or one backend of it, that cannot be used, and why. words: of `--device`, as far as they
    are known: those of the backend, else the entry point's name."""

    plugin: str
    reason: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A usable backend and who brought it."""

    backend: Backend
    plugin: str
    distribution: str


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One line of `octavo devices`: a device word, the backend behind it, and what was found.

    install: the command that brings what the backend needs, where there is no device and the package
    that brought it has an extra of its name.
    """

    word: str
    backend: str
    plugin: str
    distribution: str
    priority: int
    devices: tuple[str, ...]
    reason: str
    details: dict[str, str] = field(default_factory=dict)
    install: str = ""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What `--device` came to, and why."""

    backend: Backend
    device: str
    reason: str


class Plugins:
    """All plug-ins of an environment.

    Args:
        entry_points: those of group `octavo`; given in tests, else the environment's.
        deprecated: names of the contract that are warned about; given in tests.
    """

    def __init__(
        self,
        entry_points: Iterable[metadata.EntryPoint] | None = None,
        deprecated: Iterable[deprecation.Deprecation] = deprecation.DEPRECATED,
    ) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.backends: list[BackendEntry] = []
        self.claims: list[Claim] = []
        self._deprecated = tuple(deprecated)
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        points = metadata.entry_points(group=GROUP) if entry_points is None else entry_points
        for point in sorted(points, key=lambda p: p.name):
            self._load(point)
        self._report_clashes()

    def _load(self, point: metadata.EntryPoint) -> None:
        where = f"{point.name} ({point.value})"
        if self._manager.has_plugin(where):
            return  # an editable install beside an installed one: the same module twice
        try:
            module = point.load()
            self._manager.register(module, name=where)
            called = {h.name: h for h in self._manager.get_hookcallers(module) or ()}
            if not called:
                raise ConfigError(
                    "it implements no hook of Octavo's (see octavo.plugins.hookspecs)"
                )
            self._report_unknown(module, called, where, point.name)
            hooks = {name: hook for name, hook in called.items() if hook.has_spec()}
            self._warn_of_near_misses(module, called, where)
            for text in deprecation.used_hooks(hooks, self._deprecated):
                self.warnings.append(f"plug-in {where}: {text}")
            backends = list(module.octavo_backends()) if "octavo_backends" in hooks else []
            overrides = list(module.octavo_ops()) if "octavo_ops" in hooks else []
        except (Exception, SystemExit) as error:
            if self._manager.has_plugin(where):
                self._manager.unregister(name=where)
            self.problems.append(_problem(where, error, point.name))
            return
        for backend in backends:
            try:
                self._accept(backend, point)
            except Exception as error:  # its other backends may be fine
                words = getattr(backend, "device_types", None)
                words = words if isinstance(words, tuple) else (words,)
                self.problems.append(_problem(where, error, *words))
        for override in overrides:
            try:
                self.claims.append(Claim(validate(override), point.name, _released(point)))
            except Exception as error:
                self.problems.append(Problem(where, f"{type(error).__name__}: {error}"))

    def _report_unknown(
        self, module: Any, called: Mapping[str, pluggy.HookCaller], where: str, word: str
    ) -> None:
        """Functions marked @hookimpl that nobody will ever call; those marked optional may be."""
        for name, hook in called.items():
            if hook.has_spec():
                continue
            optional = [i.optionalhook for i in hook.get_hookimpls() if i.plugin is module]
            if not all(optional):  # what else the plug-in brings may be fine
                reason = f"{name} is no hook{nearest(name, HOOKS)}"
                self.problems.append(Problem(where, reason, (word,)))

    def _warn_of_near_misses(self, module: Any, hooks: Mapping[str, Any], where: str) -> None:
        for name, value in vars(module).items():
            if not name.startswith("octavo_") or name in hooks or not callable(value):
                continue
            if name in HOOKS:
                self.warnings.append(f"plug-in {where}: {name} is not marked @hookimpl")
            else:
                self.warnings.append(f"plug-in {where}: {name} is no hook{nearest(name, HOOKS)}")

    def _accept(self, backend: Backend, point: metadata.EntryPoint) -> None:
        if not isinstance(backend, Backend):
            raise ConfigError(
                f"octavo_backends returned {backend!r}, which is no octavo.plugins.Backend"
            )
        words = backend.device_types
        if not backend.name or not words or not isinstance(words, tuple):
            raise ConfigError(
                f"{type(backend).__name__} needs a name and a tuple of device types, got "
                f"{backend.name!r} and {words!r}"
            )
        try:
            major, minor = map(int, backend.api_version)
        except (TypeError, ValueError):
            raise ConfigError(
                f"backend {backend.name!r} has api_version {backend.api_version!r}, "
                f"not a pair as {API_VERSION}"
            ) from None
        newest = API_VERSION[0]
        taken = [m for m in (newest, newest - 1) if m >= FIRST_MAJOR]
        if major not in taken:
            raise ConfigError(
                f"backend {backend.name!r} is built for contract {major}.{minor}; this engine has "
                f"{newest}.{API_VERSION[1]}: use a release of it built for contract "
                f"{' or '.join(map(str, taken))}"
            )
        if major < newest:
            self.warnings.append(
                f"backend {backend.name!r} is built for the older contract {major}.{minor} (this engine has "
                f"{newest}.{API_VERSION[1]}), which the next one no longer takes"
            )
        elif minor > API_VERSION[1]:
            self.warnings.append(
                f"backend {backend.name!r} is built for the newer contract {major}.{minor} "
                f"(this engine has {API_VERSION[0]}.{API_VERSION[1]}); what is new there is not used"
            )
        for text in deprecation.overridden(backend, self._deprecated):
            self.warnings.append(f"backend {backend.name!r}: {text}")
        distribution = point.dist.name if point.dist is not None else "unknown"
        self.backends.append(BackendEntry(backend, point.name, distribution))

    def _report_clashes(self) -> None:
        for word, entries in self._by_word().items():
            if len(entries) > 1:
                names = ", ".join(
                    f"{e.backend.name} (priority {e.backend.priority})" for e in entries
                )
                self.warnings.append(
                    f"device word {word!r} is claimed by {names}; the first one gets it"
                )

    def _by_word(self) -> dict[str, list[BackendEntry]]:
        words: dict[str, list[BackendEntry]] = {}
        for entry in sorted(self.backends, key=lambda e: (-e.backend.priority, e.backend.name)):
            for word in entry.backend.device_types:
                words.setdefault(word, []).append(entry)
        return words

    # ---------------------------------------------------------------------------------- asking

    def models(self) -> dict[str, str]:
        """Architectures that plug-ins add, as "module:class"."""
        return self._classes("octavo_models")

    def quantization_schemes(self) -> dict[str, str]:
        """Quantisation schemes that plug-ins add, as "module:class"."""
        return self._classes("octavo_quantization_schemes")

    def tool_parsers(self) -> dict[str, str]:
        """Parsers of calls that plug-ins add, as "module:class"."""
        return self._classes("octavo_tool_parsers")

    def drafters(self) -> dict[str, str]:
        """Drafters that plug-ins add, as "module:class"."""
        return self._classes("octavo_drafters")

    def reasoning_parsers(self) -> dict[str, str]:
        """Parsers of reasoning that plug-ins add, as "module:class"."""
        return self._classes("octavo_reasoning_parsers")

    def _classes(self, hook: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            try:
                answer: Any = implementation.function()
                found.update(answer)
            except Exception as error:
                problem = Problem(
                    implementation.plugin_name, f"{hook}: {type(error).__name__}: {error}"
                )
                if problem not in self.problems:
                    self.problems.append(problem)
        return found

    def model_source(self, model: str, revision: str | None, cache_dir: Path) -> ModelFiles | None:
        """Files from the first plug-in that knows MODEL, or None."""
        hook = self._manager.hook.octavo_model_source
        files: ModelFiles | None = hook(model=model, revision=revision, cache_dir=cache_dir)
        return files

    def resolved_ops(self, backend: Backend, device: str, choice: str = "auto") -> ResolvedOps:
        """The ops that an engine runs on a device: the backend's, with what plug-ins replace.

        choice: as `--ops-from`: auto, none, or names of plug-ins with commas between, best first.

        Raises:
            ConfigError: `choice` names a plug-in that replaces no op.
        """
        found = resolve_ops(backend, device, self.claims, choice)
        for text in (
            *deprecation.overridden(found.ops, self._deprecated),
            *deprecation.filled_in(backend.capabilities(device), self._deprecated),
        ):
            found.notes.append(f"backend {backend.name!r}: {text}")
        return found

    def op_clashes(self) -> list[str]:
        """A sentence for each op that several plug-ins replace."""
        return clashes(self.claims)

    def deprecated_in(self, plan: ExecutionPlan) -> list[str]:
        """A sentence for each deprecated field that a plan uses."""
        return deprecation.filled_in(plan, self._deprecated)

    def devices(self) -> list[DeviceRow]:
        """Every device word with what its backend's probe found, best priority first."""
        rows = []
        for entry in sorted(self.backends, key=lambda e: (-e.backend.priority, e.backend.name)):
            probe = safe_probe(entry.backend)
            for word in entry.backend.device_types:
                rows.append(
                    DeviceRow(
                        word=word,
                        backend=entry.backend.name,
                        plugin=entry.plugin,
                        distribution=entry.distribution,
                        priority=entry.backend.priority,
                        devices=probe.devices,
                        reason=probe.reason,
                        details=dict(probe.details),
                        install="" if probe.devices else _extra(entry),
                    )
                )
        return rows

    def resolve(self, word: str) -> Resolved:
        """The backend for a `--device` word, which may carry a torch device: `reference:cuda`.

        Raises:
            ConfigError: nobody knows the word, or its backend finds no device; says what there is.
        """
        words = self._by_word()
        if word == "auto":
            return self._automatic(words)
        name = word if word in words else word.partition(":")[0]
        if name not in words:
            raise ConfigError(self._nobody(word, name, words))
        backend = words[name][0].backend
        probe = safe_probe(backend)
        if not probe.devices:
            raise ConfigError(
                f"--device {word!r}: backend {backend.name!r} has no device: {probe.reason}"
            )
        suffix = word.removeprefix(name).removeprefix(":")
        if suffix and word not in probe.devices:
            reached = backend.torch_device(word)
            if reached == backend.torch_device(name) and reached != suffix:
                has = f"has no such device; it has {', '.join(probe.devices)}"
                none = f"takes nothing behind the colon; use {name}"
                raise ConfigError(
                    f"--device {word!r}: backend {backend.name!r} {has if probe.devices[1:] else none}"
                )
        told_capabilities(backend, word)
        return Resolved(backend, word, f"--device {word} was asked for")

    def _nobody(self, word: str, name: str, words: Iterable[str]) -> str:
        """Why no backend takes a device word, what is most likely the reason first."""
        told = {p: f"plug-in {p.plugin} could not be used: {p.reason}" for p in self.problems}
        here = f"device words here: auto, {', '.join(sorted(words))}"
        mine = [text for p, text in told.items() if name in p.words]
        if mine:  # it is installed
            return f"--device {word!r}: " + "\n  ".join([*mine, here])
        advice = (
            "A backend's package must be installed for the Python that runs octavo: "
            f"{sys.executable} -m pip install …"
        )
        asked = f"no backend takes --device {word!r}{nearest(word, words)}; {here}."
        return "\n  ".join([asked, *told.values(), advice]) if told else f"{asked} {advice}"

    def _automatic(self, words: dict[str, list[BackendEntry]]) -> Resolved:
        passed: list[str] = []
        for word, entries in words.items():
            backend = entries[0].backend
            if backend.priority < 0:
                continue
            probe = safe_probe(backend)
            if probe.devices:
                try:
                    told_capabilities(backend, word)
                except ConfigError as error:  # the next one may be fine
                    passed.append(f"not {word}: {error}")
                    continue
                why = "; ".join([f"highest priority ({backend.priority}) with a device", *passed])
                return Resolved(backend, word, why)
            passed.append(f"not {word}: {probe.reason}")
        raise ConfigError(
            "no backend found a device: " + ("; ".join(passed) or "none is installed")
        )


def _problem(where: str, error: BaseException, *words: object) -> Problem:
    known = tuple(word for word in words if isinstance(word, str))
    return Problem(where, f"{type(error).__name__}: {error}", known)


def _released(point: metadata.EntryPoint) -> str:
    """The name and version of the package that an entry point is from."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown"


def _extra(entry: BackendEntry) -> str:
    """The command that installs the extra named as a backend, if its package has one that brings
    anything."""
    name = entry.backend.name
    try:
        needs = metadata.requires(entry.distribution) or []
    except metadata.PackageNotFoundError:
        return ""
    behind = re.compile(rf"""extra\s*==\s*['"]{re.escape(name)}['"]""")
    found = any(behind.search(text.partition(";")[2]) for text in needs)
    return f"pip install '{entry.distribution}[{name}]'" if found else ""


def safe_probe(backend: Backend) -> Probe:
    """`backend.probe()`, with an exception turned into the reason for having no device."""
    try:
        probe = backend.probe()
        if not isinstance(probe, Probe):
            raise TypeError(f"it returned {probe!r}, which is no octavo.plugins.Probe")
        return probe
    except Exception as error:
        return Probe(reason=f"its probe failed: {type(error).__name__}: {error}")


def told_capabilities(backend: Backend, device: str) -> Capabilities:
    """`backend.capabilities(device)`.

    Raises:
        ConfigError: it raised, or returned something else.
    """
    try:
        found = backend.capabilities(device)
        if not isinstance(found, Capabilities):
            raise TypeError(f"it returned {found!r}, which is no octavo.plugins.Capabilities")
        return found
    except Exception as error:
        raise ConfigError(
            f"backend {backend.name!r} cannot be used, its capabilities failed: "
            f"{type(error).__name__}: {error}"
        ) from error


@functools.cache
def plugins() -> Plugins:
    """The environment's plug-ins, found once. Each warning is issued once, as a `RuntimeWarning`."""
    found = Plugins()
    for text in found.warnings:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return found


def describe(row: DeviceRow) -> dict[str, Any]:
    """A device row as plain data, for JSON."""
    return {name: getattr(row, name) for name in DeviceRow.__slots__}
