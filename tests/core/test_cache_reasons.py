"""A request is told why its prompt was not in the cache, and nothing about other tenants."""

from __future__ import annotations

from support import Rig, request, rig

from octavo.core.blocks import BlockManager

PROMPT = list(range(17))


def told(r: Rig, name: str, prompt: list[int], **fields: object) -> tuple[int, str | None]:
    """Runs one request; its cached tokens and the reason for the rest."""
    r.engine.add(request(name, prompt, max_tokens=1, **fields))
    r.run()
    last = r.finished[name, 0]
    assert last.timings is not None
    return last.num_cached_tokens, last.timings.cache_miss


def test_diverged_and_complete() -> None:
    r = rig(block_size=4)
    assert told(r, "a", PROMPT) == (0, "diverged")
    assert told(r, "b", PROMPT) == (16, "below_block")
    assert told(r, "c", [*PROMPT[:8], 99, 99, 99, 99, 99]) == (8, "diverged")
    assert told(r, "d", [5, 6, 7, 8]) == (0, "below_block")  # its only block has the last token
    stats = r.scheduler.stats()
    assert {k: v for k, v in stats.prefix_miss_tokens.items() if v} == {
        "diverged": 17 + 5,
        "below_block": 1 + 4,
    }
    assert stats.prefix_query_tokens == 17 + 17 + 13 + 4


def test_evicted_until_it_is_known_again() -> None:
    r = rig(block_size=4, blocks=1 + 6)
    told(r, "a", PROMPT)
    told(r, "b", list(range(100, 117)))  # takes the blocks of a, its tail first
    cached, reason = told(r, "c", PROMPT)
    assert cached < 16 and reason == "evicted"
    assert told(r, "d", PROMPT) == (16, "below_block")
    r.check_empty()


def test_a_salt_or_adapter_is_told_as_such_and_others_are_not_given_away() -> None:
    r = rig(block_size=4)
    told(r, "plain", PROMPT)
    for i, fields in enumerate(({"cache_salt": "x"}, {"adapter": "x"})):
        known = told(r, f"{i}-known", PROMPT, **fields)
        unknown = told(r, f"{i}-unknown", list(range(200, 217)), **fields)
        assert known == unknown == (0, "salted")  # no word on what others sent
        assert told(r, f"{i}-again", PROMPT, **fields) == (16, "below_block")
        assert told(r, f"{i}-other", [*PROMPT[:4], *range(300, 310)], **fields) == (4, "diverged")


def test_evicted_under_another_salt_is_not_told() -> None:
    r = rig(block_size=4, blocks=1 + 6)
    told(r, "a", PROMPT, cache_salt="x")
    told(r, "b", list(range(100, 117)))
    assert told(r, "c", PROMPT, cache_salt="y") == (0, "salted")
    assert told(r, "d", PROMPT) == (0, "diverged")


def test_bypassed_and_off() -> None:
    r = rig(block_size=4)
    told(r, "a", PROMPT)
    assert told(r, "b", PROMPT, prompt_logprobs=0) == (0, "prompt_logprobs")
    off = rig(block_size=4, prefix_caching=False)
    assert told(off, "a", PROMPT) == told(off, "b", PROMPT) == (0, "off")


def test_samples_are_told_the_same() -> None:
    r = rig(block_size=4)
    r.engine.add(request("n", PROMPT, n=3, temperature=1, max_tokens=2))
    r.run()
    for i in range(3):
        timings = r.finished["n", i].timings
        assert timings is not None and timings.cache_miss == "diverged"


def test_the_record_of_evicted_blocks_is_bounded() -> None:
    manager = BlockManager(num_blocks=3, block_size=4)
    for i in range(100):
        [block] = manager.allocate(1)
        manager.remember(block, bytes([i]))
        manager.free([block])
        manager.check([])
    assert manager.evictions == 98
    assert [i for i in range(100) if manager.was_evicted(bytes([i]))] == list(range(86, 98))
    manager.reset_cache()
    assert not manager.was_evicted(bytes([97]))
