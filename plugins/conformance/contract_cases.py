"""Cases of the contract itself: what a backend says of itself, and when."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
import types
from importlib import metadata
from typing import Any

import torch

from octavo.core.contract import API_VERSION
from octavo.core.lanes import LaneError, LaneSet
from octavo.core.quantization import FORMS, KEPT
from octavo.plugins import Backend, Capabilities, ExecutionPlan, Ops, Probe, hookimpl
from octavo.plugins.conformance.case import Case, Dice, Failed, Finding, NotOffered, demand
from octavo.plugins.conformance.scorecard import execution_of
from octavo.plugins.conformance.subject import FLOATS, KV_DTYPES, Subject
from octavo.plugins.manager import FIRST_MAJOR, Plugins, plugins

HEAVY = (
    "torch", "triton", "jax", "jaxlib", "libtpu", "torch_xla", "torch_tpu", "torch_npu", "habana_frameworks",
    "intel_extension_for_pytorch", "zentorch", "tensorflow", "transformers", "cupy", "numba", "tvm",
    "openvino", "onnxruntime",
)  # fmt: skip
"""What takes seconds to import, or opens a device."""

PROBE_SECONDS = 2.0
"""Of processor time that one probe may take."""

_CHILD = """
import json, sys, time
sys.path[:] = json.loads(sys.argv[1])
name, module, kind, heavy = json.loads(sys.argv[2])
from octavo.plugins.manager import plugins
found = [e.backend for e in plugins().backends if e.backend.name == name]
if not found:
    import importlib
    found = [getattr(importlib.import_module(module), kind)()]
before = time.process_time()
probe = found[0].probe()
spent = time.process_time() - before
print(json.dumps([[m for m in heavy if m in sys.modules], spent, list(probe.devices), probe.reason]))
"""


def light_probe(subject: Subject, dice: Dice) -> Finding:
    """In a fresh process, finding the backend and probing imports nothing heavy and takes no time."""
    kind = type(subject.backend)
    asked = json.dumps([subject.backend.name, kind.__module__, kind.__qualname__, HEAVY])
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(sys.path), asked],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise Failed(
            f"the probe fails in a process of its own: {lines[-1] if lines else 'no message'}"
        )
    loaded, seconds, devices, reason = json.loads(done.stdout.splitlines()[-1])
    demand(not loaded, f"finding the backend and probing imports {', '.join(loaded)}")
    demand(seconds <= PROBE_SECONDS, f"the probe takes {seconds:.1f} s of processor time")
    demand(bool(devices or reason), "the probe finds no device and gives no reason")
    return Finding(detail=f"probe: {seconds * 1000:.0f} ms of processor time")


def repeatable_probe(subject: Subject, dice: Dice) -> Finding:
    """The probe may be asked again, and answers a Probe."""
    first, second = subject.backend.probe(), subject.backend.probe()
    demand(isinstance(first, Probe), f"probe() returned {first!r}, no Probe")
    demand(first.devices == second.devices, f"probe() found {first.devices}, then {second.devices}")
    return Finding()


def _torch_state() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "random state": torch.get_rng_state().numpy().tobytes(),
        "default device": str(torch.get_default_device()),
    }


def pure_plan(subject: Subject, dice: Dice) -> Finding:
    """The same arguments give the same plan, and nothing else happens: not to the backend's own state,
    nor to torch's."""
    heads = (4, 2)
    size, block = subject.head_size(dice), subject.block_size(dice)
    dtype, kv_dtype = subject.beside(subject.dtypes[0])
    asked: dict[str, Any] = {"block_size": block, "heads": heads, "head_size": size}
    torch_before, own_before = _torch_state(), repr(vars(subject.backend))
    first = subject.plan(dtype, kv_dtype, **asked)
    subject.plan(dtype, kv_dtype, heads=(8, 8), head_size=size, layers=3, longest=300, vocab=999)
    second = subject.plan(dtype, kv_dtype, **asked)
    demand(first == second, "plan() gives another plan for the same arguments")
    torch_after = _torch_state()
    changed = [name for name, value in torch_before.items() if torch_after[name] != value]
    demand(not changed, f"plan() changes torch's {', '.join(changed)}")
    demand(repr(vars(subject.backend)) == own_before, "plan() changes the backend's own state")
    return Finding()


def obeying_plan(subject: Subject, dice: Dice) -> Finding:
    """Plans take the dtypes and block sizes that are declared, and can be carried out."""
    caps = subject.capabilities
    for dtype, kv_dtype in subject.numbers():
        for block in caps.block_sizes[:4] + caps.block_sizes[-1:]:
            plan = subject.plan(
                dtype, kv_dtype, block_size=block, head_size=subject.head_size(dice)
            )
            demand(isinstance(plan, ExecutionPlan), f"plan() returned {plan!r}")
            got = (plan.dtype, plan.kv_dtype, plan.block_size)
            demand(
                got == (dtype, kv_dtype, block),
                f"plan() makes {got} of dtype {dtype}, KV dtype {kv_dtype} and block size {block}, "
                "which are declared",
            )
    try:
        lanes = LaneSet(plan.lanes, plan.max_logits_rows)
    except LaneError as error:
        raise Failed(f"the plan's lanes cannot be driven: {error}") from error
    return Finding(detail=f"{len(plan.lanes)} lanes for {lanes.max_num_seqs} sequences")


def told_capabilities(subject: Subject, dice: Dice) -> Finding:
    """Capabilities are data of the kinds that the contract names, and the same each time."""
    caps = subject.backend.capabilities(subject.device)
    demand(isinstance(caps, Capabilities), f"capabilities() returned {caps!r}")
    again = subject.backend.capabilities(subject.device)
    demand(dataclasses.asdict(caps) == dataclasses.asdict(again), "capabilities() differ each time")
    demand(bool(caps.dtypes) and bool(caps.kv_dtypes), "no dtype, or no KV dtype, is declared")
    for what, words, known in (
        ("dtypes", caps.dtypes, FLOATS),
        ("KV dtypes", caps.kv_dtypes, KV_DTYPES),
        ("quantisation forms", caps.quantization, tuple(FORMS)),
        ("kept codes", caps.kept_codes, tuple(KEPT)),
    ):
        strange = [w for w in words if w not in known]
        demand(not strange, f"{what} {strange} are none of {', '.join(known)}")
    alone = [d for d in caps.dtypes if caps.kv_equals_dtype and d not in caps.kv_dtypes]
    demand(not alone, f"kv_equals_dtype is declared, but no KV cache in {alone}, which are dtypes")
    missing = [d for d in caps.native_dtypes if d not in caps.dtypes]
    demand(not missing, f"native dtypes {missing} are not among the dtypes {caps.dtypes}")
    demand(all(s >= 1 for s in caps.block_sizes) and bool(caps.block_sizes), "no block sizes")
    low, high, step = caps.head_sizes
    demand(1 <= low <= high and step >= 1, f"head sizes {caps.head_sizes} hold none")
    first = -(-low // step) * step
    demand(first <= high, f"head sizes {caps.head_sizes} hold none")
    json.dumps(dataclasses.asdict(caps), default=list)
    for op in ("", *caps.ops):
        execution_of(caps.notes, op)
    return Finding()


def told_ops(subject: Subject, dice: Dice) -> Finding:
    """Rows of `Capabilities.ops` name operations, and say "portable" only of what was not replaced."""
    caps, kind = subject.capabilities, type(subject.ops)
    names = {n for n in vars(Ops) if not n.startswith("_") and callable(getattr(Ops, n))}
    for op, runs in caps.ops.items():
        if op == "every op":
            continue
        demand(op in names, f"ops has a row for {op!r}, which is no operation of the contract")
        replaced = getattr(kind, op) is not getattr(Ops, op)
        portable = runs.startswith("portable")
        demand(
            replaced or portable,
            f"ops says that {op} is run by {runs!r}, but it is the portable one",
        )
    return Finding()


def memory(subject: Subject, dice: Dice) -> Finding:
    """Memory is measured: something in all, and no more free than that."""
    found = subject.backend.memory(subject.device)
    demand(0 <= found.free <= found.total and found.total > 0, f"memory() says {found}")
    return Finding()


def _registered(backend: Backend) -> Plugins:
    """A plug-in manager that finds this backend alone, by an entry point of its own."""
    module = types.ModuleType("octavo_conformance_handshake")
    module.octavo_backends = hookimpl(lambda: [backend])  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        return Plugins([metadata.EntryPoint("handshake", module.__name__, "octavo")])
    finally:
        del sys.modules[module.__name__]


def handshake(subject: Subject, dice: Dice) -> Finding:
    """This release takes the backend as it is, one of a newer minor version or the major before with a
    warning, and refuses other majors."""
    own = _registered(subject.backend)
    demand(not own.problems, f"it is refused: {own.problems[0].reason if own.problems else ''}")
    words = [w for w in own.warnings if "contract" in w]
    demand(not words, f"it loads with a warning: {words[0] if words else ''}")
    major, minor = API_VERSION
    for version, taken, warned in (
        ((major, minor + 1), True, True),
        ((major - 1, 0), major > FIRST_MAJOR, major > FIRST_MAJOR),
        ((major + 1, 0), False, False),
        ((major - 2, 0), False, False),
    ):
        other = copy.copy(subject.backend)
        other.api_version = version
        found = _registered(other)
        demand(
            bool(found.backends) == taken,
            f"a copy of it for contract {version}: taken is not {taken}",
        )
        demand(
            any("newer contract" in w for w in found.warnings) == warned, f"{version}: no warning"
        )
    return Finding()


def hooks(subject: Subject, dice: Dice) -> Finding:
    """The plug-in's functions named octavo_… are hooks, and marked."""
    found = plugins()
    entries = [e for e in found.backends if e.backend.name == subject.backend.name]
    if not entries:
        raise NotOffered("the backend was handed over as an object, no plug-in brought it")
    words = [w for w in found.warnings if w.startswith(f"plug-in {entries[0].plugin} ")]
    demand(not words, "; ".join(words))
    mine = [p for p in found.problems if p.plugin.startswith(f"{entries[0].plugin} ")]
    demand(not mine, "; ".join(p.reason for p in mine))
    return Finding()


def cases(subject: Subject, full: bool) -> list[Case]:
    """All cases of this file."""
    bodies = {
        "probe": (light_probe, repeatable_probe),
        "plan": (pure_plan, obeying_plan),
        "capabilities": (told_capabilities, told_ops, memory),
        "api-version": (handshake,),
        "hooks": (hooks,),
    }
    return [
        Case("contract", name, "", body.__name__.replace("_", "-"), 0, body)
        for name, group in bodies.items()
        for body in group
    ]
