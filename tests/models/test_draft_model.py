"""Drafts by a second model and by the model's own first layers: whatever they guess, the tokens stay."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from byte_model import byte_llama
from tiny_models import engine, greedy, run, tokens_of

from octavo.core.blocks import BlockManager
from octavo.core.config import ConfigError
from octavo.core.drafting.drafter import SpeculativeConfig
from octavo.core.drafting.model import ModelDrafter
from octavo.core.engine import Engine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("models")
    return {
        "target": byte_llama(where / "target"),
        "other": byte_llama(where / "other", num_hidden_layers=1, hidden_size=24),
        "wide": byte_llama(where / "wide", vocab_size=272),
        "renamed": byte_llama(where / "renamed"),
    }


def drafting(models: dict[str, Path], asked: dict[str, Any], **options: Any) -> Engine:
    config = {"num_speculative_tokens": 4, "adaptive": False, **asked}
    if "model" in config:
        config["model"] = str(models[config["model"]])
    return engine(models["target"], speculative_config=config, **options)


def drafter_of(made: Engine) -> ModelDrafter:
    drafter = made.scheduler.speculation.drafter  # type: ignore[union-attr]
    assert isinstance(drafter, ModelDrafter)
    return drafter


def requests() -> list[Any]:
    common = [(7 * i) % 250 for i in range(40)]
    return [
        greedy(f"q{i}", common[: 12 * i] + [i] * (3 + i), 30, n=1 + (i == 2), ignore_eos=True,
               temperature=float(i % 2), seed=i)
        for i in range(4)
    ]  # fmt: skip


def by_sample(updates: dict[str, Any]) -> dict[tuple[str, int], list[int]]:
    return {
        (name, index): tokens_of([u for u in own if u.index == index])
        for name, own in updates.items()
        for index in {u.index for u in own}
    }


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> dict[tuple[str, int], list[int]]:
    """What `requests` bring without drafts."""
    return by_sample(run(engine(models["target"]), *requests()))


def check_drafter(made: Engine) -> None:
    """No shadow outlives its sequence."""
    gc.collect()
    drafter = drafter_of(made)
    assert drafter.num_shadows == 0
    drafter.blocks.check([])


SECOND = {"method": "draft_model", "model": "other"}
SAME = {"method": "draft_model", "model": "target"}
SMALLER = {"method": "draft_model", "quantization": "int8"}
OWN = {"method": "self", "num_layers": 1}
ALL = {"method": "self", "num_layers": 3}


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("asked", [SAME, ALL], ids=["the same model", "all layers"])
def test_who_knows_it_all_is_always_right(
    models: dict[str, Path], asked: dict[str, Any], device: str
) -> None:
    made = drafting(models, asked, device=device)
    run(
        made,
        greedy("a", [1, 2, 3], 41, ignore_eos=True),
        greedy("b", [9] * 30, 41, ignore_eos=True),
    )
    stats = made.stats()
    assert stats.drafted_tokens == stats.accepted_tokens > 50
    check_drafter(made)


@pytest.mark.parametrize("asked", [SECOND, SAME, SMALLER, OWN, {"method": "self"}])
@pytest.mark.parametrize(
    "options", [{}, {"num_kv_blocks": 9}, {"max_num_batched_tokens": 16}], ids=str
)
def test_the_same_tokens(
    models: dict[str, Path],
    plain: dict[tuple[str, int], list[int]],
    asked: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Prefix hits, samples that fork, preemption; greedy and drawn."""
    made = drafting(models, asked, **options)
    for _ in range(2):  # the second time from the prefix cache
        assert by_sample(run(made, *requests())) == plain
    assert made.stats().drafted_tokens > 0
    if "num_kv_blocks" in options:
        assert made.stats().preemptions > 0
    check_drafter(made)


def test_the_same_model_in_smaller_weights(models: dict[str, Path]) -> None:
    asked = [greedy(f"q{i}", [i] * (20 + i), 30, ignore_eos=True) for i in range(4)]
    plain = by_sample(run(engine(models["target"], device="cpu"), *asked))
    made = drafting(models, SMALLER, device="cpu")
    assert by_sample(run(made, *asked)) == plain
    stats = made.stats()
    assert 2 * stats.accepted_tokens > stats.drafted_tokens > 0
    assert any("drafts: by target in int8" in note for note in made.info.notes)
    with pytest.raises(ConfigError, match=r"of the drafter: .*int7"):
        drafting(models, {"method": "draft_model", "quantization": "int7"})


def test_steps_are_timed_before_the_first_request(
    models: dict[str, Path], plain: dict[tuple[str, int], list[int]]
) -> None:
    made = drafting(models, SAME | {"adaptive": True}, num_kv_blocks=5, max_num_batched_tokens=64)
    speculation = made.scheduler.speculation
    assert speculation is not None and speculation.times is not None
    own, others = speculation.times.curve, drafter_of(made).times.curve
    assert [size for size, _ in own] == [1, 2, 4, 8, 16, 32, 64]  # what 4 blocks of 16 hold
    assert [size for size, _ in others] == [1, 2, 4, 8, 16, 32, 64]
    assert all(seconds > 0 for _, seconds in own + others)
    assert "time steps" in made.info.phases
    check_drafter(made)
    made = drafting(models, SAME | {"adaptive": True})
    assert by_sample(run(made, *requests())) == plain
    assert "time steps" not in drafting(models, SAME).info.phases


def test_a_short_pool_forgets(
    models: dict[str, Path], plain: dict[tuple[str, int], list[int]]
) -> None:
    made = drafting(models, SAME)
    drafter = drafter_of(made)
    drafter.blocks = BlockManager(6, drafter.blocks.block_size, False)
    assert by_sample(run(made, *requests())) == plain
    assert made.stats().drafted_tokens > 0
    check_drafter(made)


def test_an_abort_frees_the_shadow(models: dict[str, Path]) -> None:
    made = drafting(models, OWN)
    made.add(greedy("a", [1, 2, 3], 60, ignore_eos=True))
    for _ in range(4):
        made.step()
    assert drafter_of(made).num_shadows == 1
    made.abort(["a"])
    made.scheduler.check()
    check_drafter(made)


def test_a_drafter_that_fails_costs_nothing(
    models: dict[str, Path],
    plain: dict[tuple[str, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = drafting(models, SAME)

    def fail(plan: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(drafter_of(made).runner, "execute", fail)
    assert by_sample(run(made, *requests())) == plain
    assert made.stats().drafted_tokens == 0
    check_drafter(made)


def test_weights_are_shared(models: dict[str, Path]) -> None:
    made = drafting(models, OWN)
    assert drafter_of(made).runner._weights is made._runner._weights
    assert any("first 1 of 3 layers" in note for note in made.info.notes)


def test_another_vocabulary_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="vocabulary of 272 tokens, target of 264"):
        drafting(models, {"method": "draft_model", "model": "wide"})
    file = models["renamed"] / "tokenizer.json"
    known = json.loads(file.read_text())
    vocab = known["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(known))
    with pytest.raises(ConfigError, match=r"its token .* is b'[ab]', that of target is b'[ab]'"):
        drafting(models, {"method": "draft_model", "model": "renamed"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "draft_model"}, "needs the model that drafts"),
        ({"method": "ngram", "model": "x"}, "model is of the method draft_model"),
        ({"method": "ngram", "quantization": "int4"}, "quantization is of the method draft_model"),
        ({"method": "draft_model", "quantization": 4}, "quantization must be a name, got 4"),
        ({"method": "ngram", "num_layers": 2}, "num_layers is of the method self"),
        ({"method": "self", "num_layers": 0}, "at least 1, got 0"),
    ],
)
def test_what_cannot_be_used(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse(given)


def test_more_layers_than_there_are(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="the model has 3 layers"):
        drafting(models, {"method": "self", "num_layers": 4})
