"""Other libraries' products: chosen only after a measurement that says so, and right when chosen."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import engine, greedy, make, prompt_of, run

from octavo.backends.cpu import backend as cpu_backend
from octavo.backends.cpu import paths, providers
from octavo.backends.cpu.providers import ROWS, Provider, trial_key
from octavo.core.config import ConfigError, EngineConfig
from octavo.core.instruments import LinearPath
from octavo.kernels import cpu


def torchs_own(path: LinearPath, **changes: object) -> Provider:
    """torch itself, as if it were a guest: its F.linear is a real path."""
    made = Provider("guest", "torch", "torch", frozenset(), 2, path)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


PLAIN = LinearPath("guest", "float32", 1e-5, paths._plain)
WRONG = LinearPath("guest", "float32", 1e-5, lambda weight: lambda x: x @ weight.T * 1.001)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    threads = cpu.threads()
    yield
    cpu.set_threads(threads)


def offer(monkeypatch: pytest.MonkeyPatch, provider: Provider, shares: float | None) -> None:
    monkeypatch.setattr(providers, "PROVIDERS", (provider,))
    if shares is not None:
        path = providers.verdict_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({trial_key(provider, 2): {str(r): shares for r in ROWS}}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"module": "no_such_module"}, "not installed"),
        ({"flags": frozenset({"no_such_flag"})}, "lacks no_such_flag"),
        ({"package": "numpy"}, "is not for torch"),
        ({}, None),
    ],
)
def test_what_cannot_be_used_says_why(changes: dict[str, object], reason: str | None) -> None:
    found = torchs_own(PLAIN, **changes).unusable()
    assert (found is None) if reason is None else (reason in str(found))


def test_nothing_is_chosen_that_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = torchs_own(PLAIN)
    offer(monkeypatch, guest, None)
    assert providers.choose(2) is None and "not measured" in providers.status(2)
    offer(monkeypatch, guest, 0.5)
    assert providers.choose(2) is guest and "used with" in providers.status(2)
    assert providers.choose(3) is None  # measured with two threads
    offer(monkeypatch, guest, 0.9)
    assert providers.choose(2) is None and "1.11 at 8 rows" in providers.status(2)
    assert providers.status(2).endswith("not used")
    providers.verdict_file().write_text("{")
    assert providers.choose(2) is None


def test_a_trial_keeps_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = torchs_own(PLAIN)
    offer(monkeypatch, guest, None)
    cpu.set_threads(2)
    providers.measure(2)
    [(key, shares)] = providers.read_verdicts().items()
    assert key == trial_key(guest, 2) and set(shares) == {str(rows) for rows in ROWS}
    assert all(0 < share < providers.WRONG for share in shares.values())


def test_a_wrong_product_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, torchs_own(WRONG), None)
    providers.measure(2)
    assert providers.choose(2) is None and "fails or is wrong" in providers.status(2)


def test_the_engine_uses_what_was_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same tokens through a provider; products of other formats, and invariance, stay the kernels'."""
    calls: list[int] = []

    def pack(weight: torch.Tensor) -> object:
        product = paths._plain(weight)
        return lambda x: (calls.append(x.shape[0]), product(x))[1]

    offer(monkeypatch, torchs_own(LinearPath("guest", "float32", 1e-5, pack)), 0.5)  # type: ignore[arg-type]
    make("Qwen2", {}).save_pretrained(tmp_path)  # biases on q, k and v
    request = {"name": "a", "prompt": prompt_of(20), "count": 12}

    def tokens(**options: object) -> tuple[list[int], bool, str]:
        calls.clear()
        made = engine(tmp_path, device="cpu", threads=2, **options)
        updates = run(made, greedy(**request))["a"]  # type: ignore[arg-type]
        ops = made.info.capabilities["ops"]["linear"]
        return [t for u in updates for t in u.token_ids], bool(calls), ops

    want, used, ops = tokens()
    assert not used and ops.startswith("c++")
    assert tokens(op_providers="auto") == (want, True, "guest")
    for options in ({"dtype": "float16"}, {"batch_invariant": True}, {"op_providers": "none"}):
        assert not tokens(**{"op_providers": "auto", **options})[1], options
    assert not tokens()[1], "a later engine does not inherit it"


def test_devices_cpu_says_which() -> None:
    notes = cpu_backend.CpuBackend().capabilities("cpu").notes
    assert "zentorch: " in notes["providers"] and "ipex: " in notes["providers"]


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="op_providers"):
        EngineConfig(op_providers="always")
