"""Embedded prompts in the scheduler: what they take from the cache and leave in it, and how they end."""

from __future__ import annotations

import pytest
from null_engine import byte_tokenizer
from support import Rig, expected_embedding, expected_tokens, model_info, request, rig

from octavo.core.engine import Engine
from octavo.core.output import OutputProcessor
from octavo.core.params import ParamError, RequestRefused
from octavo.core.pooling import Pooling
from octavo.core.types import Request, StepPlan

PROMPT = list(range(2, 82))  # five blocks of 16


def pooled(name: str, prompt: int | list[int], kind: str = "mean", **values: object) -> Request:
    return request(name, prompt, max_tokens=0, pooling=Pooling(kind), **values)  # type: ignore[arg-type]


def run(r: Rig, *requests: Request) -> None:
    for each in requests:
        r.engine.add(each)
    r.run()
    r.check_empty()
    for each in requests:
        end = r.finished[each.id, 0]
        if each.pooling is not None:
            assert (end.finish_reason, end.embedding) == ("stop", expected_embedding(each))


@pytest.mark.parametrize("kind", ["mean", "last", "cls"])
@pytest.mark.parametrize("budget", [7, 32, 512])
def test_prompts_are_pooled_in_parts_beside_others_that_generate(kind: str, budget: int) -> None:
    r = rig(budget=budget)
    talk = [request(f"talk {i}", 20 + 30 * i, max_tokens=12) for i in range(3)]
    run(r, *[pooled(f"{i}", 5 + 40 * i, kind) for i in range(4)], *talk)
    for each in talk:
        assert r.tokens[each.id, 0] == expected_tokens(each, 0, 4096, 10**6)
    assert r.scheduler.stats().finished["stop"] == 4


def test_the_last_token_may_stand_behind_cached_blocks_and_a_mean_may_not() -> None:
    r = rig()
    run(r, request("first", PROMPT, max_tokens=1))
    for kind, hits in (("last", 64), ("mean", 0), ("cls", 0)):
        before = r.scheduler.stats().prefix_hit_tokens
        run(r, pooled(kind, PROMPT, kind))
        assert r.scheduler.stats().prefix_hit_tokens - before == hits
        assert r.finished[kind, 0].num_cached_tokens == hits
    assert r.scheduler.stats().prefix_miss_tokens["pooling"] == 2 * len(PROMPT)


def test_what_an_embedded_prompt_computes_others_take_over() -> None:
    r = rig()
    run(r, pooled("sum", PROMPT))
    run(r, request("talk", PROMPT, max_tokens=3))
    assert r.finished["talk", 0].num_cached_tokens == 64


def test_a_prompt_that_begins_as_one_that_is_summed_does_not_wait_for_its_own_copy() -> None:
    """It waits for nobody and nobody for it; of two that pool the last token one waits for the other."""
    for kind, waits in (("mean", 0), ("last", 1)):
        r = rig(budget=100)
        run(r, pooled("a", PROMPT, kind), pooled("b", PROMPT, kind))
        assert r.scheduler.stats().prefix_waits == waits


def test_one_that_is_preempted_sums_from_its_beginning() -> None:
    r = rig(blocks=12, block_size=16, budget=24, prefix_caching=False)
    r.engine.add(request("urgent", 40, max_tokens=120, priority=-1))
    while r.scheduler.blocks.num_used < 4:
        r.step()
    long = pooled("sum", 110)
    r.engine.add(long)
    r.engine.add(request("other", 10, max_tokens=60, priority=-1))
    r.run()
    assert r.finished["sum", 0].embedding == expected_embedding(long)
    assert r.scheduler.stats().preemptions > 0


def test_an_abort_in_the_middle_frees_everything() -> None:
    r = rig(budget=16)
    r.engine.add(pooled("gone", 100))
    r.step()
    r.take(r.engine.abort(["gone"]))
    assert r.finished["gone", 0].finish_reason == "abort"
    assert r.finished["gone", 0].embedding is None
    r.check_empty()


def test_numbers_that_are_not_finite_end_it_with_an_error() -> None:
    r = rig()
    r.engine.add(pooled("nan", 10))
    r.runner._pool = lambda item, values: None  # type: ignore[method-assign]  # as `pooler.pool` leaves it out
    r.run()
    end = r.finished["nan", 0]
    assert (end.finish_reason, end.embedding) == ("error", None)
    assert "not finite" in str(end.stop_reason)
    r.check_empty()


def test_a_step_that_fails_ends_it() -> None:
    r = rig()

    def fail(_: StepPlan) -> None:
        raise RuntimeError("out of luck")

    r.runner.hook = fail
    r.engine.add(pooled("unlucky", 10))
    r.run()
    assert r.finished["unlucky", 0].finish_reason == "error"
    r.check_empty()


@pytest.mark.parametrize("task", ["generate", "embed"])
def test_a_task_that_the_model_has_not_is_refused_with_the_reason(task: str) -> None:
    r = rig()
    info = model_info(tasks=(task,), not_a_task="it is for something else")
    engine = Engine(r.scheduler, r.runner, info)
    wrong = pooled("a", 3) if task == "generate" else request("a", 3)
    with pytest.raises(ParamError, match="for something else") as caught:
        engine.add(wrong)
    assert caught.value.param == "model"
    engine.add(request("b", 3) if task == "generate" else pooled("b", 3))


def test_a_prompt_that_never_fits_is_refused() -> None:
    with pytest.raises(RequestRefused, match="4 KV blocks"):
        rig(blocks=4, block_size=16).engine.add(pooled("long", 60))


def test_a_whole_context_may_be_embedded() -> None:
    r = rig(max_model_len=64)
    run(r, pooled("full", 64))
    with pytest.raises(RequestRefused, match="64"):
        r.engine.add(pooled("longer", 65))


def test_an_output_carries_the_embedding_and_is_counted() -> None:
    r = rig()
    outputs = OutputProcessor(byte_tokenizer())
    one = pooled("one", 10)
    outputs.add(one.id, None, one.prompt_token_ids, one.params)
    r.engine.add(one)
    done = []
    while r.engine.has_unfinished():
        done += outputs.process(r.engine.step())[0]
    [(_, output)] = done
    assert output.embedding == expected_embedding(one) and output.finished
    assert outputs.stats.embeddings == 1 and outputs.stats.finished["stop"] == 1
    assert outputs.stats.prompt_tokens == 10 and outputs.stats.generation_tokens == 0
