"""The core's end-to-end tests on the strict chip: tokens are those of the reference backend where its logits
are rounded to bfloat16, whatever the scheduler does on the way."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
import torch
from byte_model import EOS, byte_llama
from model_variants import VARIANTS, random_model
from rounded_reference import TALLY, same_tokens
from tiny_models import (
    beam_scores,
    engine,
    everything,
    full,
    greedy,
    make,
    prompt_of,
    reference,
    run,
    tokens_of,
)

from octavo.core.engine import Engine
from octavo.core.params import RequestRefused, SamplingParams, StructuredOutputsParams
from octavo.core.types import Request, SequenceUpdate

BLOCK = 128


def strict(folder: Path, **options: Any) -> Engine:
    return engine(folder, **{"device": "strict", "max_num_seqs": 16, **options})


def finished(made: Engine, *requests: Request) -> dict[str, list[SequenceUpdate]]:
    """What requests came to, with nothing compiled on the way and no block left behind."""
    warm = made.stats().compilations
    assert warm > 0
    found = run(made, *requests)
    assert made.stats().compilations == warm
    assert made.stats().kv_blocks_used == 0
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_model(name: str, tmp_path: Path, chip: Any) -> None:
    kind, changes, length = VARIANTS[name]
    model = make(kind, changes)
    model.save_pretrained(tmp_path)
    prompt = prompt_of(length)
    for budget in (512, 16):  # whole and in chunks
        made = strict(tmp_path, max_num_batched_tokens=budget)
        requests = [
            greedy("r", prompt, 12),
            greedy("s", prompt, 1, prompt_logprobs=-1, logprobs=-1),
        ]
        found = finished(made, *requests)
        same_tokens(tmp_path, requests, found)
        got, exact = everything(found["s"]), reference(model, prompt, 1)[1]
        assert (got - exact).abs().max() < 0.1  # two roundings of logits below 8
        made.shutdown()


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2"])
@pytest.mark.parametrize("case", range(3))
def test_random_models_requests_and_limits(kind: str, case: int, tmp_path: Path, chip: Any) -> None:
    """Chunks, preemption, prefix hits, several samples, all at once; each request twice."""
    dice = random.Random(f"strict {kind} {case}")
    random_model(dice, kind).save_pretrained(tmp_path)
    tight = case < 2
    made = strict(
        tmp_path,
        num_kv_blocks=6 if tight else 60,
        max_num_batched_tokens=dice.choice([16, 48, 100]) if tight else 512,
        max_num_seqs=8,
        max_model_len=300,
    )
    common = prompt_of(270, seed=case)
    requests = []
    for i in range(8):
        start = dice.choice([115, 118, 120] if tight else [20, 130, 260, 260])
        prompt = common[:start] + prompt_of(dice.randint(1, 8), seed=i)
        asked: dict[str, Any] = {"n": dice.choice([1, 1, 2])}
        asked |= {"prompt_logprobs": 1} if dice.random() < 0.3 else {}
        asked |= {"logprobs": 2} if dice.random() < 0.3 else {}
        requests.append(greedy(f"r{i}", prompt, dice.randint(12, 30), **asked))
    first = finished(made, *requests)
    second = finished(made, *(msgspec.structs.replace(r, id=r.id + " again") for r in requests))
    same_tokens(tmp_path, requests, first)
    same_tokens(tmp_path, requests, {r.id: second[r.id + " again"] for r in requests})
    stats = made.stats()
    assert (stats.preemptions > 0) == tight
    assert tight or stats.prefix_hit_tokens > 0
    made.shutdown()


def test_a_cold_prefix_is_computed_once(llama: Path, chip: Any) -> None:
    shared = prompt_of(2 * BLOCK + 20, seed=9)
    requests = [greedy(f"r{i}", shared + prompt_of(3 + i, seed=i), 6) for i in range(6)]
    requests.append(greedy("same", requests[0].prompt_token_ids, 6))
    made = strict(llama)
    found = finished(made, *requests)
    same_tokens(llama, requests, found)
    assert made.stats().prefix_hit_tokens == 6 * 2 * BLOCK
    made.shutdown()


def test_many_decode_beside_long_prompts(llama: Path, chip: Any) -> None:
    requests = [greedy(f"r{i}", prompt_of(1 + 5 * i, seed=i), 20) for i in range(14)]
    requests += [greedy(f"long{i}", prompt_of(400 + 90 * i, seed=i), 4) for i in range(3)]
    made = strict(llama, max_num_batched_tokens=100)
    same_tokens(llama, requests, finished(made, *requests))
    made.shutdown()


def test_seeded_draws_on_the_device(llama: Path, chip: Any) -> None:
    """Of (seed, output index, vocabulary id) alone: as the reference draws, alone and in company."""
    params: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}
    requests = [
        greedy(f"r{i}", prompt_of(20 + i, seed=i), 16, **params, seed=i, n=1 + i % 3)
        for i in range(8)
    ]
    made = strict(llama)
    ties = TALLY.ties
    found = finished(made, *requests)
    same_tokens(llama, requests, found)
    assert TALLY.ties - ties <= 2
    alone = finished(made, msgspec.structs.replace(requests[3], id="alone"))["alone"]
    assert tokens_of(alone) == tokens_of(found["r3"])
    made.shutdown()


def test_what_changes_logits_is_done_on_the_host(llama: Path, chip: Any) -> None:
    prompt = prompt_of(30)
    requests = [
        greedy("bias", prompt, 6, logit_bias={5: 100.0}),
        greedy("allowed", prompt, 6, allowed_token_ids=[7, 9]),
        greedy("penalties", prompt, 20, repetition_penalty=1.5, frequency_penalty=0.7),
        greedy("plain", prompt, 20),
    ]
    made = strict(llama)
    found = finished(made, *requests)
    assert tokens_of(found["bias"]) == [5] * 6
    assert set(tokens_of(found["allowed"])) <= {7, 9}
    same_tokens(llama, requests[2:], found)
    made.shutdown()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("blocks", [2, 5])
def test_frees_come_late(llama: Path, chip: Any, caching: bool, blocks: int) -> None:
    """More sequences than blocks: nobody writes a block that the chip may still read. Where that is all
    that there is to wait for, the chip is asked to finish."""
    requests = [greedy(f"r{i}", prompt_of(122 + i % 3, seed=i), 30) for i in range(8)]
    made = strict(llama, num_kv_blocks=1 + blocks, max_model_len=200, enable_prefix_caching=caching)
    drains = chip.counts["drain"]
    found = finished(made, *requests)
    same_tokens(llama, requests, found)
    assert (made.stats().preemptions > 0) == (blocks == 5)
    assert (chip.counts["drain"] > drains) == (blocks == 2)
    made.shutdown()


def test_samples_share_blocks_until_they_write(llama: Path, chip: Any) -> None:
    copied = chip.counts["copy_blocks"]
    requests = [
        greedy(f"r{i}", prompt_of(BLOCK + 3 + 2 * i, seed=i), 10, n=4, seed=i, temperature=1.0)
        for i in range(2)
    ]
    made = strict(llama)
    same_tokens(llama, requests, finished(made, *requests))
    assert chip.counts["copy_blocks"] > copied
    made.shutdown()


def test_beams_share_part_and_are_preempted(llama: Path, chip: Any) -> None:
    """Beams in a pool that cannot hold all groups at once find what they find alone; scores are those of
    exact logits but for the roundings to bfloat16."""
    copied = chip.counts["copy_blocks"]
    asked = [
        greedy(f"b{i}", prompt_of(BLOCK - 9 + 6 * i, seed=i), 14, use_beam_search=True, n=4)
        for i in range(3)
    ]
    others = [greedy(f"r{i}", prompt_of(120 + i, seed=20 + i), 20) for i in range(3)]
    alone: dict[str, list[SequenceUpdate]] = {}
    for request in asked:
        made = strict(llama, max_model_len=200)
        alone |= finished(made, request)
        made.shutdown()
    made = strict(llama, max_model_len=200, num_kv_blocks=1 + 9, max_num_batched_tokens=48)
    found = finished(made, others[0], *asked, *others[1:])
    assert made.stats().preemptions > 0
    same_tokens(llama, others, found)
    model = make("Llama", {"max_position_embeddings": 1024})
    for request in asked:
        mine, theirs = found[request.id], alone[request.id]
        assert [u.score for u in mine] == pytest.approx([u.score for u in theirs], abs=0.05)
        assert mine[0].token_ids == theirs[0].token_ids
        exact = beam_scores(model, request)
        assert [u.score for u in mine] == pytest.approx(exact, abs=0.1)
    assert chip.counts["copy_blocks"] > copied
    made.shutdown()


def test_grammars_are_followed(tmp_path: Path, chip: Any) -> None:
    """Masks are laid over logits on the host; neighbours without one are drawn on the device as ever."""
    folder = byte_llama(tmp_path)
    made = strict(folder)
    wanted = {"regex": "(ab|cd){2,4}[0-9]", "choice": ["yes", "no"]}
    requests = [
        Request(
            id=f"{kind}{i}",
            prompt_token_ids=[5, 9, i, 7],
            params=SamplingParams(
                temperature=1.0,
                seed=i,
                max_tokens=30,
                structured_outputs=StructuredOutputsParams(**{kind: spec}),
            ),
            eos_token_ids=(EOS,),
        )
        for kind, spec in wanted.items()
        for i in range(3)
    ]
    free = [greedy(f"free{i}", [3, i, 8], 12) for i in range(3)]
    found = finished(made, *requests, *free)
    same_tokens(folder, free, found)
    decode = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).decode
    for request in requests:
        text = decode(tokens_of(found[request.id]))
        assert found[request.id][-1].finish_reason == "stop"
        assert re.fullmatch("(ab|cd){2,4}[0-9]|yes|no", text), (request.id, text)
    made.shutdown()


def test_aborts_leave_others_alone(llama: Path, chip: Any) -> None:
    requests = [greedy(f"r{i}", prompt_of(9 + 40 * i, seed=i), 12) for i in range(5)]
    made = strict(llama, max_num_batched_tokens=48, num_kv_blocks=12)
    for request in requests:
        made.add(request)
    found: dict[str, list[SequenceUpdate]] = {r.id: [] for r in requests}
    steps = 0
    while made.has_unfinished():
        steps += 1
        updates = made.step() + (made.abort([f"r{steps // 2}"]) if steps in (2, 5) else [])
        for update in updates:
            found[update.request_id].append(update)
        made.scheduler.check()
    kept = [r for r in requests if r.id not in ("r1", "r2")]
    same_tokens(llama, kept, found)
    made.shutdown()


@pytest.mark.parametrize("writes", [0, 2, 7, 13])
def test_a_lost_cache_costs_one_step(llama: Path, chip: Any, writes: int) -> None:
    """The chip fails in a layer and takes its handle along: that step's requests end with an error, all
    others begin again and give the same tokens."""
    made = strict(llama, max_num_batched_tokens=48)
    requests = [greedy(f"r{i}", prompt_of(20 + 9 * i, seed=i), 10) for i in range(5)]
    for request in requests:
        made.add(request)
    found: dict[str, list[SequenceUpdate]] = {r.id: [] for r in requests}
    chip.fail_after(writes)
    while made.has_unfinished():
        for update in made.step():
            found[update.request_id].append(update)
        made.scheduler.check()
    ended = {name: updates[-1] for name, updates in found.items()}
    failed = [name for name, last in ended.items() if last.finish_reason == "error"]
    assert failed and all("InjectedError" in str(ended[name].stop_reason) for name in failed)
    kept = [r for r in requests if r.id not in failed]
    assert kept
    same_tokens(llama, kept, found)
    # Whoever comes later finds an engine as good as new.
    after = finished(made, *(msgspec.structs.replace(r, id=r.id + " later") for r in requests))
    same_tokens(llama, requests, {r.id: after[r.id + " later"] for r in requests})
    made.shutdown()


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_half_precision(llama: Path, chip: Any, dtype: str, kv_dtype: str) -> None:
    requests = [greedy(f"r{i}", prompt_of(30 + i, seed=i), 1, prompt_logprobs=-1) for i in range(3)]
    made = strict(llama, dtype=dtype, kv_cache_dtype=kv_dtype)
    found = finished(made, *requests)
    other = engine(llama, dtype="float32")
    exact = run(other, *requests)
    for r in requests:
        mine, theirs = (
            full([e for u in updates[r.id] for e in u.prompt_logprobs or ()])
            for updates in (found, exact)
        )
        assert 0 < (mine - theirs).abs().mean() < 0.15
    made.shutdown()


def test_copies_to_the_host_end_late_and_keep_their_blocks(llama: Path, chip: Any) -> None:
    """Blocks of an unfinished copy are not handed out, however many others want one."""
    made = strict(llama, num_kv_blocks=8, max_model_len=300)
    first = greedy("first", prompt_of(2 * BLOCK, seed=1), 2)
    finished(made, first)
    blocks, runner = made.scheduler.blocks, made._runner
    size, held = BLOCK, []
    from octavo.core.blocks import extend_hashes, root_hash

    hashes: list[bytes] = []
    extend_hashes(
        hashes, root_hash(None, None, ()), torch.tensor(first.prompt_token_ids).int().numpy(), size
    )
    held = blocks.lookup(hashes)
    assert len(held) == 2
    transfer = runner._ops.export_blocks(runner.kv, held)  # type: ignore[attr-defined]
    assert not transfer.done()
    blocks.pin(held, transfer)
    wanted = torch.cat([h.look().data[held].view(torch.uint8) for h in runner.kv], 1).clone()  # type: ignore[attr-defined]
    more = [greedy(f"r{i}", prompt_of(200 + i, seed=i + 7), 20) for i in range(6)]
    found = run(made, *more)
    same_tokens(llama, more, found)
    assert torch.equal(transfer.wait(), wanted)
    made.shutdown()


def test_what_no_bucket_holds_is_refused_at_the_door(llama: Path, chip: Any) -> None:
    made = strict(llama, max_model_len=200)
    with pytest.raises(RequestRefused, match="200"):
        made.add(greedy("long", prompt_of(220), 4))
    params = SamplingParams(temperature=0.0, max_tokens=1, n=17)
    with pytest.raises(RequestRefused, match="n=17"):
        made.add(Request(id="wide", prompt_token_ids=[1, 2], params=params))
    finished(made, greedy("fits", prompt_of(190), 4))
    made.shutdown()
