"""A step's time beside the least that the machine allows for its work, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.config import ConfigError, EngineConfig
from octavo.core.entry.bench.counting import PHASES, Work, step_work
from octavo.core.entry.bench.stats import columns, markdown, milliseconds
from octavo.core.entry.bench.steps import Step, Steps, median_step, sized
from octavo.core.entry.design import Phases, design, make_model, place_weights
from octavo.core.entry.op_choice import choose_ops
from octavo.core.entry.wiring import build_engine, resolve_device
from octavo.core.instruments import Instruments, Peaks

if TYPE_CHECKING:
    from octavo.core.contract import WeightSpec
    from octavo.core.engine import ModelInfo
    from octavo.core.entry.design import Design
    from octavo.core.loading.files import ModelFiles

NOTE = """\
floor     max(operations / peak, bytes / read bandwidth): the machine's, measured before and after
measured  the median step; linear to sampling are seconds inside kernels, host all the rest of the step
gap       measured / floor
A multiply-add is two operations. Bytes: weights once, keys and values, logits; activations stay in caches,
and weights do not: a model that fits a cache may beat its floor."""


@dataclass(frozen=True)
class Case:
    """One kind of step: the median one of those run, and its work."""

    name: str
    step: Step
    work: dict[str, Work]

    def rows(self, peaks: Peaks) -> list[tuple[str, float, float]]:
        """(phase, least seconds, measured seconds) of each phase, and of the total."""
        floors = {phase: self.work[phase].seconds(peaks) for phase in PHASES}
        rows = [(phase, floors[phase], self.step.phases[phase]) for phase in PHASES]
        return [*rows, ("total", sum(floors.values()), self.step.seconds)]


@dataclass(frozen=True)
class Roofline:
    """What was measured, and on what."""

    info: ModelInfo
    form: str  # how the model's products keep their weights
    peaks: Peaks
    cases: list[Case]


def instruments_of(config: EngineConfig) -> Instruments:
    """What the configured device is measured with.

    Raises:
        ConfigError: its backend offers nothing to measure with.
    """
    resolved = resolve_device(config.device)
    found = resolved.backend.instruments(resolved.device)
    if found is None:
        raise ConfigError(
            f"backend {resolved.backend.name!r} on {resolved.device} offers no instruments to measure "
            "with; --device cpu with compiled kernels does"
        )
    return found


def described(config: EngineConfig, files: ModelFiles) -> tuple[list[WeightSpec], Design]:
    """A model's weights and how it would run on the configured device; no weight is read.

    Raises:
        ConfigError, ModelError: the model cannot run there.
    """
    resolved = resolve_device(config.device)
    made = design(config, files, resolved, Phases())
    model = make_model(made, files, choose_ops(config, resolved, []).ops)
    return list(place_weights(made, model, Phases()).specs), made


def measure(
    config: EngineConfig,
    files: ModelFiles,
    *,
    prefill: int,
    batches: Sequence[int],
    context: int,
    repeats: int,
) -> Roofline:
    """Runs a prefill step of `prefill` tokens (0: none), and decode steps of each number of sequences.

    Raises:
        ConfigError, ModelError: what was asked cannot run here.
    """
    instruments = instruments_of(config)
    config = config.with_values(
        enable_prefix_caching=False,
        max_num_batched_tokens=config.max_num_batched_tokens or max(512, prefill),
    )
    config = sized(config, max(batches), max(prefill, context + repeats + 64))
    specs, made = described(config, files)
    shape, dtype = made.shape, made.dtype
    engine = build_engine(config, files=files)
    try:
        before = instruments.peaks()
        steps = Steps(engine, instruments)
        found = {}
        if prefill:
            found[f"prefill {prefill}"] = median_step(steps.prefill(prefill, repeats))
        for batch in batches:
            found[f"decode {batch} x {context}"] = median_step(
                steps.decode(batch, context, repeats)
            )
        peaks = _best(before, instruments.peaks())
    finally:
        engine.shutdown()
    cases = [
        Case(name, step, step_work(specs, shape, dtype, step.chunks))
        for name, step in found.items()
    ]
    forms = {spec.scheme or dtype: None for spec in specs if spec.role in ("linear", "head")}
    return Roofline(engine.info, " and ".join(forms), peaks, cases)


def _best(a: Peaks, b: Peaks) -> Peaks:
    """What was reached at least once: whoever else uses the machine can only lower it."""
    return Peaks(max(a.float32, b.float32), max(a.int8, b.int8), max(a.read_bytes, b.read_bytes))


def _cells(case: Case, peaks: Peaks) -> list[tuple[str, ...]]:
    return [
        (
            case.name if phase == PHASES[0] else "",
            phase,
            milliseconds(floor),
            milliseconds(spent),
            f"{spent / floor:.2f}" if floor else "-",
            f"{spent / case.step.seconds:.0%}",
        )
        for phase, floor, spent in case.rows(peaks)
    ]


def table(found: Roofline, *, as_markdown: bool = False) -> str:
    """Floor, measured and gap of each phase of each case."""
    peaks = found.peaks
    head = (
        f"{found.info.name} ({found.info.device}, weights {found.form}, KV {found.info.kv_dtype}): "
        f"{peaks.float32 / 1e9:.0f} GFLOP/s float32, {peaks.int8 / 1e9:.0f} Gop/s int8, "
        f"{peaks.read_bytes / 1e9:.1f} GB/s"
    )
    rows: list[tuple[str, ...]] = [("step", "phase", "floor ms", "measured ms", "gap", "of step")]
    for case in found.cases:
        rows += _cells(case, peaks)
    if as_markdown:
        return f"{head}\n\n{markdown(rows)}"
    return f"{head}\n\n{columns(rows)}\n\n{NOTE}"


def record(found: Roofline) -> dict[str, Any]:
    """Everything as plain values for JSON."""
    return {
        "weights": found.form,
        "peaks": asdict(found.peaks),
        "cases": [
            {
                "name": case.name,
                "sequences": len(case.step.chunks),
                "tokens": sum(chunk.new for chunk in case.step.chunks),
                "context": sum(c.context for c in case.step.chunks) / len(case.step.chunks),
                "phases": {
                    phase: {
                        "floor_seconds": floor,
                        "seconds": spent,
                        **(asdict(case.work[phase]) if phase in case.work else {}),
                    }
                    for phase, floor, spent in case.rows(found.peaks)
                },
            }
            for case in found.cases
        ],
        "note": NOTE,
    }
