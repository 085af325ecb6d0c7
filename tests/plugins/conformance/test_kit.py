"""The conformance kit can fail: each broken backend is named by the check for what it breaks, and by no
other. The whole kit over the built-in backends is a lane of its own."""

from __future__ import annotations

import json
import re
from typing import Any

import broken_backends
import pytest
from broken_backends import Awkward, CompiledOnly, with_ops

from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.cpu.ops import CpuOps
from octavo.plugins import Backend
from octavo.plugins.conformance.run import catalogue, check, run_case
from octavo.plugins.conformance.scorecard import Result
from octavo.plugins.conformance.subject import Subject
from octavo.plugins.manager import plugins

pytestmark = pytest.mark.usefixtures("one_thread")


def results(backend: Backend, group: str, *ops: str) -> list[Result]:
    """The first case of each kind of a group, and a second one of some ops; long contexts are left out."""
    subject = Subject(backend, backend.device_types[0])
    found = [c for c in catalogue(subject) if c.group == group and c.number <= (c.op in ops)]
    return [run_case(subject, c) for c in found if c.aspect != "long"]


def failing(found: list[Result]) -> set[str]:
    return {
        r.op + (f"/{r.id.split('/')[-2]}" if r.id.count("/") > 2 else "")
        for r in found
        if r.state == "failed"
    }


ATTENTION = {
    f"paged_attention/{a}"
    for a in ("mixed", "decode", "prefill", "one", "window", "softcap", "sinks")
}

ACTIVATIONS = {
    f"act_and_mul/{kind}{rows}"
    for kind in ("silu", "gelu", "gelu_tanh")
    for rows in ("", "-strided")
}

BROKEN: dict[str, set[str]] = {
    "Ops": set(),
    "WritesOneSlotMore": {"write_kv/slots"},
    "ClearsNewBlocks": set(),
    "ClearsWrittenBlocks": {"write_kv/slots"} | ATTENTION,
    "WritesPadding": {"write_kv/slots", "write_kv/padding"},
    "IgnoresWindow": {"paged_attention/window"},
    "IgnoresSoftcap": {"paged_attention/softcap"},
    "IgnoresSinks": {"paged_attention/sinks"},
    "HeadsInTurn": {f"paged_attention/{a}" for a in ("mixed", "decode", "prefill", "one")},
    "ReadsWhatIsNotWritten": ATTENTION,
    "BlocksInOrder": ATTENTION,
    "CopiesOneLayer": {"copy_blocks/in-order"},
    "CopiesAtOnce": {"copy_blocks/in-order"},
    "ImportsNextDoor": {"export_import_blocks/round-trip"},
    "CountsTooFewBytes": {"export_import_blocks/round-trip"},
    "MultipliesInHalf": {
        "linear/plain",
        "linear/bias",
        "linear/gated",
        "linear/head",
        "linear/strided",
        "tied_weight/head",
    },
    "DropsBias": {"linear/bias"},
    "DropsMinima": {"linear/codes", "linear/floats", "linear/kept"},
    "QuantisesBesideKeptCodes": {"linear/kept"},
    "WrongRow": {"embedding/rows", "embedding/kept"},
    "TiesNothing": {"tied_weight/head"},
    "NormsWithoutEps": {"rms_norm", "rms_norm/strided"},
    "NormsWithoutTheSum": {"add_rms_norm", "add_rms_norm/strided"},
    "NormsAsIfWhole": {"rms_norm/strided", "rms_norm/heads"},
    "AddsAsIfWhole": {"add_rms_norm/strided"},
    "AddsBesideItsRows": {"add_rms_norm/strided"},
    "ActivatesAsIfWhole": {"act_and_mul/silu-strided"},
    "EncodesAsIfWhole": {"layer_norm/strided"}
    | {f"activation/{kind}-strided" for kind in ("gelu", "gelu_tanh", "relu")},
    "TurnsHalves": {"rotary/interleaved"},
    "OneGelu": {"act_and_mul/gelu", "act_and_mul/gelu-strided"},
    "ActivatesInDouble": ACTIVATIONS,
    "ActivatesNothing": ACTIVATIONS | {"linear/gated"},
    "DrawsAnew": {f"sample/{a}" for a in ("plain", "top_k", "top_p", "min_p", "together", "ties")},
    "DrawsAlways": {"sample/greedy"},
    "ForgetsTopP": {"sample/top_p", "sample/together", "sample/ties"},
    "KeepsAllTies": {"sample/ties"},
    "MasksFirstRows": {f"mask_logits/{a}" for a in ("random", "every-row", "whole-words", "blank")},
    "MasksWholeWords": {f"mask_logits/{a}" for a in ("random", "every-row", "blank")},
    "MasksFromTheLargestBit": {f"mask_logits/{a}" for a in ("random", "every-row", "whole-words")},
    "AllowsFirstRows": {f"best_allowed/{a}" for a in ("random", "whole-words", "blank")},
    "AllowsAll": {f"best_allowed/{a}" for a in ("random", "whole-words", "blank")},
    "AllowsByMasking": {f"best_allowed/{a}" for a in ("random", "whole-words", "blank")},
    "RanksFromZero": {"token_logprobs"},
    "LogprobsInTwos": {"token_logprobs"},
    "StoresTooMuch": {"store_packed"},
    "EncodesCausally": {"encoder_attention/whole", "encoder_attention/shared"},
    "EncodesHeadsInTurn": {"encoder_attention/shared"},
    "NormsWithoutBias": {"layer_norm", "layer_norm/strided"},
    "NormsByTheWrongVariance": {"layer_norm", "layer_norm/strided"},
    "ActivatesByOneGelu": {"activation/gelu", "activation/gelu-strided"},
    "LetsNegativesPass": {"activation/relu", "activation/relu-strided"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_op_that_is_wrong_is_named(name: str) -> None:
    ops = {found.partition("/")[0] for found in BROKEN[name]}
    found = results(with_ops(name), "op", *ops - {"paged_attention"})
    assert failing(found) == BROKEN[name], {r.id: r.detail for r in found if r.state == "failed"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "ActivatesInDouble",
            r"silu gave \(\d+, \d+\) of float64; it must give \(\d+, \d+\) of float32",
        ),
        ("ActivatesNothing", "silu gave NoneType, not a tensor"),
    ],
)
def test_a_result_of_another_kind_is_told(name: str, words: str) -> None:
    card = check(with_ops(name), "sound", only="act_and_mul/float32/silu/0", speed=False)
    assert re.search(words, card.failed[0].detail), card.failed


@pytest.mark.parametrize(
    ("name", "op", "words"),
    [
        ("WritesForTheEffect", "write_kv", "write_kv returned None; it must return the handle"),
        (
            "CopiesForTheEffect",
            "copy_blocks",
            "copy_blocks returned None; it must return the handles",
        ),
    ],
)
def test_handles_that_do_not_come_back_are_told(name: str, op: str, words: str) -> None:
    card = check(with_ops(name), "sound", only=f"{op}/*", speed=False)
    assert [row.detail for row in card.failed] == [words]
    only = "forks/float32/grouped-heads/0"
    card = check(with_ops(name), "sound", only=only, speed=False)
    assert words in card.failed[0].detail


def test_an_error_names_the_line_of_the_backends_own_code() -> None:
    """The innermost one, though it is torch that raises."""
    card = check(with_ops("DividesByAWord"), "sound", only="rms_norm/float32/0", speed=False)
    (row,) = card.failed
    assert re.search(r"^it raised TypeError: .* \(broken_ops\.py:\d+\)$", row.detail), row.detail
    assert row.detail in json.dumps(card.as_dict())


def test_bodies_that_nobody_overrode_are_portable() -> None:
    card = check(with_ops("DropsBias"), "sound", only="*/float32/*/0", speed=False)
    runs = {row.op: row.runs for row in card.rows if row.group == "op"}
    assert runs.pop("linear") == "DropsBias"
    assert set(runs.values()) == {"portable"}
    exports = with_ops("ImportsNextDoor")
    card = check(exports, "sound", only="export_import_blocks/*", speed=False)
    assert {row.runs for row in card.rows} == {"ImportsNextDoor"}


CONTRACT: dict[str, set[str]] = {
    "Sound": set(),
    "HeavyProbe": {"probe/light-probe"},
    "ProbeThatRaises": {"probe/light-probe", "probe/repeatable-probe"},
    "ImpurePlan": {"plan/pure-plan"},
    "PlanThatKeepsTheModel": {"plan/pure-plan"},
    "PlanThatSetsTorch": {"plan/pure-plan"},
    "PlanThatDoesNotListen": {"plan/obeying-plan"},
    "ChangingCapabilities": {"capabilities/told-capabilities"},
    "UnknownPlace": {"capabilities/told-capabilities"},
    "NoCacheForADtype": {"capabilities/told-capabilities"},
    "ClaimsAKernel": {"capabilities/told-ops"},
    "MemoryFromNowhere": {"capabilities/memory"},
    "AnotherContract": {"api-version/handshake"},
}


@pytest.mark.parametrize("name", CONTRACT)
def test_a_rule_that_is_broken_is_named(name: str) -> None:
    backend = getattr(broken_backends, name)()
    subject = Subject(backend, "sound")
    cases = [c for c in catalogue(subject) if c.group == "contract" and c.op != "refusal"]
    if "Probe" not in name and name != "Sound":  # it takes a process
        cases = [c for c in cases if c.aspect != "light-probe"]
    found = [run_case(subject, c) for c in cases]
    assert {r.id.removesuffix("/0") for r in found if r.state == "failed"} == CONTRACT[name], found


def test_words_that_nobody_knows_are_told_once() -> None:
    backend = broken_backends.DeclaresUnknownWords()
    (row,) = check(backend, "sound", only="*0", speed=False).failed
    assert row.detail == "dtypes ['fp16'] are none of float32, float16, bfloat16"


def test_a_dtype_that_does_not_work_is_named() -> None:
    card = check(broken_backends.DeclaresTooMuch(), "sound", only="linear/*", speed=False)
    failed = {(row.op, row.dtype) for row in card.failed}
    assert failed == {("linear", "float16")}
    assert "no float16 kernel" in card.failed[0].detail
    card = check(broken_backends.DeclaresTooMuch(), "sound", only="numbers/*", speed=False)
    assert {row.dtype for row in card.failed} == {"float16,kv=float32"}


def test_a_cache_in_the_weights_dtype_alone_is_tried_in_no_other() -> None:
    subject = Subject(broken_backends.OneDtype(), "sound", full=True)
    assert subject.numbers() == [("float32", "float32"), ("bfloat16", "bfloat16")]
    [case] = [c for c in catalogue(subject) if (c.op, c.aspect) == ("refusal", "kv_cache_dtype")]
    found = run_case(subject, case)
    assert found.state == "passed" and "bfloat16" in found.detail


def test_what_is_not_declared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Awkward()
    card = check(backend, "awkward", only="refusal/*", speed=False)
    assert card.passed and card.rows[0].cases == 6
    # An engine that lets everything through.
    monkeypatch.setattr("octavo.core.entry.design._validated", lambda plan, *_: plan)
    card = check(backend, "awkward", only="refusal/*", speed=False)
    assert card.rows[0].failures == 3 and card.rows[0].failing == "refusal/block_size/0"


ENGINE: dict[str, set[str]] = {
    "Sound": set(),
    "TokensFromTheWrongEnd": {
        "chunked-prefill",
        "preemption",
        "swap",
        "prefix-hits",
        "forks",
        "aborts",
    },
    "KeepsTheBatch": {
        "chunked-prefill",
        "preemption",
        "swap",
        "prefix-hits",
        "forks",
        "aborts",
        "seeds",
    },
}


@pytest.mark.parametrize("name", ENGINE)
def test_wrong_tokens_are_named(name: str) -> None:
    found = results(getattr(broken_backends, name)(), "engine")
    found = [r for r in found if r.op != "numbers" and "/grouped-heads/" in r.id]
    assert {r.op for r in found} == {"seeds"} | ENGINE["TokensFromTheWrongEnd"]
    assert {r.op for r in found if r.state == "failed"} == ENGINE[name], found


def test_lost_copies_are_seen_in_forks() -> None:
    found = results(with_ops("CopiesOneLayer"), "engine")
    failed = {r.op for r in found if r.state == "failed"}
    assert failed == {"forks"}, found


def test_a_swap_that_is_declared_and_does_not_work_is_seen() -> None:
    subject = Subject(with_ops("ImportsNextDoor"), "sound")
    cases = [c for c in catalogue(subject) if c.op in ("swap", "preemption") and c.number == 0]
    states = {(r.op, r.state) for r in [run_case(subject, c) for c in cases]}
    assert states == {("swap", "failed"), ("preemption", "passed")}


def test_a_swap_that_is_not_declared_is_refused_and_not_offered() -> None:
    subject = Subject(broken_backends.WithoutSwap(), "sound")
    cases = [c for c in catalogue(subject) if "swap" in (c.op, c.aspect.removesuffix("_space"))]
    states = {(r.op, r.state) for r in [run_case(subject, c) for c in cases if c.number == 0]}
    assert states == {("refusal", "passed"), ("swap", "not offered")}


def test_an_awkward_backend_that_is_right_passes() -> None:
    """Static buckets, donated handles, one block size, draws of its own."""
    for group in ("op", "contract", "engine"):
        found = results(Awkward(), group)
        assert not failing(found), [r for r in found if r.state == "failed"]
    states = {r.op: r.state for r in found}
    assert states["seeds"] == "not offered" and states["forks"] == states["swap"] == "passed"


def test_lanes_of_their_own_pass() -> None:
    """Prompts computed whole in one lane, decoding in another, padded rows of logits."""
    for group in ("op", "contract", "engine"):
        found = results(broken_backends.TwoLanes(), group)
        assert not failing(found), [r for r in found if r.state == "failed"]
    states = {r.op: r.state for r in found}
    assert states["prefix-hits"] == "not offered" and states["swap"] == "passed"


def test_what_was_only_compiled_is_not_said_to_have_run() -> None:
    card = check(CompiledOnly(), "sound", only="*/float32/*0", speed=False)
    rows = {row.op: row for row in card.rows if row.dtype == "float32"}
    assert (rows["linear"].state, rows["linear"].execution) == ("compiled", "compiled")
    assert (rows["rms_norm"].state, rows["rms_norm"].execution) == ("passed", "stand-in")
    assert card.execution == rows["rotary"].execution == "interpreted"


ALONE: dict[str, set[str]] = {
    "InDouble": set(),
    "MultipliesByCompany": {"linear/batch-invariant"},
    "NormsByCompany": {"rms_norm/batch-invariant"},
    "AddsByCompany": {"add_rms_norm/batch-invariant"},
    "AttendsByCompany": {"paged_attention/batch-invariant"},
}


@pytest.mark.parametrize("name", ALONE)
def test_bits_that_change_in_company_are_seen_where_they_are_promised(name: str) -> None:
    backend = broken_backends.SaysInvariant()
    backend.ops_class = name
    subject = Subject(backend, "sound")
    cases = [c for c in catalogue(subject) if "batch-invariant" in (c.op, c.aspect)]
    assert {c.op for c in cases} > {"linear", "rms_norm", "add_rms_norm", "paged_attention"}
    found = [run_case(subject, c) for c in cases]
    wanted = ALONE[name] | ({"batch-invariant/grouped-heads"} if ALONE[name] else set())
    assert failing(found) == wanted, [r for r in found if r.state == "failed"]
    assert all("batch_invariant is declared" in r.detail for r in found if r.state == "failed")
    assert backend.limits.batch_invariant is False, "it is not left as it was"


def test_bits_in_company_are_not_asked_of_who_promises_nothing() -> None:
    cases = catalogue(Subject(broken_backends.Sound(), "sound"))
    assert {c.op for c in cases if "batch-invariant" in (c.op, c.aspect)} == set()


def test_an_8_bit_cache_may_round_and_no_more() -> None:
    backend = broken_backends.EightBitCache()
    subject = Subject(backend, "sound")
    cases = [c for c in catalogue(subject) if c.op in ("paged_attention", "write_kv")]
    cases = [c for c in cases if c.aspect != "long"]
    found = [run_case(subject, c) for c in cases]
    assert not failing(found), [r for r in found if r.state == "failed"]
    backend.ops_class = "KeepsEightBitsOfAll"
    subject = Subject(backend, "sound")
    assert failing([run_case(subject, c) for c in cases]) == {"paged_attention/window"}


def test_an_interpreted_device_gets_fewer_and_smaller_checks_of_every_kind() -> None:
    backend = broken_backends.Interpreted()
    subject, usual = Subject(backend, "sound"), Subject(broken_backends.Sound(), "sound")
    few, many = catalogue(subject), catalogue(usual)
    assert {(c.op, c.dtype) for c in few} == {(c.op, c.dtype) for c in many}
    assert {c.aspect for c in few} == {c.aspect for c in many}
    assert len(few) < 0.6 * len(many)
    assert subject.plan("float32", "float32").lanes[0].max_tokens == 64
    full = Subject(backend, "sound", full=True)
    assert len(catalogue(full, full=True)) == len(catalogue(usual, full=True))
    assert full.plan("float32", "float32").lanes[0].max_tokens == 256
    some = [c for c in few if c.dtype == "float32" and c.group != "contract"]
    found = [run_case(subject, c) for c in some]
    assert not failing(found), [r for r in found if r.state == "failed"]
    assert {r.op for r in found if r.state != "passed"} == {
        "decoder_layer",
        "decoder_layers",
        "decoder_logits",
        "store_packed",
    }


def failures_of_all(ops: type[CpuOps], op: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the first cases of an op say on the CPU backend with these ops, once every one has failed."""
    monkeypatch.setattr(CpuBackend, "ops", lambda self, device: ops())
    subject = Subject(CpuBackend(), "cpu")
    cases = [c for c in catalogue(subject) if c.op == op and c.number == 0]
    found = [run_case(subject, c) for c in cases]
    assert cases and {r.state for r in found} == {"failed"}
    return [r.detail for r in found]


def test_rows_of_logits_that_all_layers_leave_out_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneTooFew(CpuOps):
        def decoder_layers(self, x: Any, specs: Any, ctx: Any) -> Any:
            out = super().decoder_layers(x, specs, ctx)
            if ctx.logits_only:
                out[ctx.meta.batch.logits_rows[-1]] += 1
            return out

    details = failures_of_all(OneTooFew, "decoder_layers", monkeypatch)
    assert all("where only rows of logits are wanted" in detail for detail in details)


def test_logits_of_other_rows_than_wanted_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class RowsInOrder(CpuOps):
        def decoder_logits(self, spec: Any, ctx: Any) -> Any:
            return super().decoder_logits(spec, ctx).flip(0)

    details = failures_of_all(RowsInOrder, "decoder_logits", monkeypatch)
    assert all("gives other bits than its parts" in detail for detail in details)


@pytest.mark.parametrize("word", ["cpu", "reference"])
def test_a_sample_of_the_kit_over_a_built_in_backend(word: str) -> None:
    resolved = plugins().resolve(word)
    subject = Subject(resolved.backend, resolved.device)
    cases = catalogue(subject)
    some = [c for c in cases if c.number == 0 and (c.group != "engine" or c.aspect == "window")]
    found = [run_case(subject, c) for c in some if c.aspect not in ("long", "light-probe")]
    assert not failing(found), [r for r in found if r.state == "failed"]
    passed = {r.op for r in found if r.state == "passed"}
    assert passed >= {c.op for c in cases} - {
        "decoder_layer",
        "decoder_layers",
        "decoder_logits",
        "store_packed",
        "probe",
        "prefix-hits",
        "numbers",
        "refusal",
    } - {c.op for c in cases if c.group == "engine"}
