"""Requests that begin alike and come at once, over a whole engine: computed once, the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import engine, greedy, prompt_of, reference, run, tokens_of

from octavo.core.types import StepPlan

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("budget", [64, 512])
def test_a_cold_prefix_is_computed_once_and_tokens_stay(
    llama: tuple[Path, Any], device: str, budget: int
) -> None:
    folder, model = llama
    shared = prompt_of(160, seed=9)
    requests = [greedy(f"r{i}", shared + prompt_of(3 + i, seed=i), 6) for i in range(8)]
    requests.append(greedy("same", requests[0].prompt_token_ids, 6))
    found: dict[bool, dict[str, list[int]]] = {}
    computed: dict[bool, int] = {}
    for caching in (True, False):
        made = engine(
            folder,
            device=device,
            num_kv_blocks=200,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
        )
        plans: list[StepPlan] = []
        execute = made._runner.execute
        made._runner.execute = lambda plan, plans=plans, execute=execute: (  # type: ignore[method-assign]
            plans.append(plan) or execute(plan)
        )
        found[caching] = {name: tokens_of(got) for name, got in run(made, *requests).items()}
        computed[caching] = sum(
            max(0, min(item.start + item.count, item.sequence.num_prompt) - item.start)
            for plan in plans
            for item in plan.items
        )
        made.shutdown()
    assert found[True] == found[False]
    for r in requests[:-1]:
        assert found[True][r.id] == reference(model, r.prompt_token_ids, 6)[0]
    own = sum(len(r.prompt_token_ids) - 160 for r in requests)
    assert computed == {True: 160 + own, False: 9 * 160 + own}
