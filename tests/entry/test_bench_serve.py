"""Load on a server with known delays: formulas, order and identities, never absolute speed."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from sse_server import PROMPT_TOKENS, SseServer, in_thread

from octavo.core.config import ConfigError
from octavo.core.entry.bench import server_process
from octavo.core.entry.bench.http_client import Address, Client, TransferError
from octavo.core.entry.bench.load import Run, Sample, arrivals, run_load
from octavo.core.entry.bench.serving import Point, Target, Words, sweep
from octavo.core.entry.bench.stats import summary
from octavo.core.entry.bench.workload import Item, Workload, make_workload
from octavo.core.entry.cli.main import main

FAKES = Path(__file__).parents[1] / "fakes"


@pytest.fixture(scope="module")
def fake() -> Iterator[tuple[SseServer, int]]:
    with in_thread() as found:
        yield found


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def load(port: int, bodies: list[dict[str, Any]], starts: list[float] | None = None,
         path: str = "/completions", **options: Any) -> Run:  # fmt: skip
    async def go() -> Run:
        client = Client(url(port))
        encoded = [json.dumps({"max_tokens": 5} | body).encode() for body in bodies]
        try:
            return await run_load(client, path, encoded, starts or [0.0] * len(bodies), **options)
        finally:
            client.close()

    return asyncio.run(go())


def test_percentiles_are_numpys() -> None:
    values = [float(v) for v in np.random.default_rng(0).exponential(1, 77)]
    found = summary(values)
    assert found["mean"] == pytest.approx(np.mean(values))
    for p in (50, 90, 95, 99):
        assert found[f"p{p}"] == pytest.approx(np.percentile(values, p))
    assert summary([]) == {} and set(summary([2.0]).values()) == {2.0}


def test_formulas_by_hand() -> None:
    sample = Sample(due=0.0, sent=10.0, last=12.6, chunks=[11.0, 11.5, 12.5], output_tokens=5)
    assert sample.ttft == 1.0 and sample.e2e == pytest.approx(2.6)
    assert sample.tpot == pytest.approx((2.6 - 1.0) / 4)
    assert sample.gaps == [0.5, 1.0]
    silent = Sample(due=0.0, sent=1.0, last=3.0, output_tokens=1)  # a token without text
    assert silent.ttft == silent.e2e == 2.0 and silent.tpot is None and silent.gaps == []
    failed = Sample(due=0.0, sent=1.0, last=1.5, error="timeout", message="late")
    run = Run([sample, silent, failed], seconds=4.0, lag=0.0, client_cpu=1.0, most_in_flight=3)
    point = Point(math.inf, 8, run)
    values = point.values({"ttft": 1500.0, "e2e": 2600.5})
    assert values["succeeded"] == 2 and values["errors"] == {"timeout": 1}
    assert values["error_messages"] == ["late"] and values["rate"] == "inf"
    assert values["requests_per_second"] == 0.5 and values["output_tokens_per_second"] == 1.5
    assert values["goodput_per_second"] == 0.25 and values["goodput_share"] == pytest.approx(1 / 3)
    assert values["mean_in_flight"] == pytest.approx((2.6 + 2.0 + 0.5) / 4)
    assert values["client"]["cpu_share"] == 0.25
    assert values["ttft"]["mean"] == 1.5 and values["tpot"]["p99"] == pytest.approx(0.4)
    assert len(point.within({"tpot": 300.0})) == 1  # one token has no time per further token


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_known_delays_are_found_again(fake: tuple[SseServer, int], path: str) -> None:
    body = {"max_tokens": 8, "first_ms": 60, "gap_ms": 20}
    run = load(fake[1], [body] * 6, path=path)
    assert len(run.good) == 6 and not run.errors
    for sample in run.good:
        assert sample.ttft >= 0.055  # the chunk that opens a chat answer has no text
        assert sample.tpot is not None and sample.tpot >= 0.018
        assert len(sample.gaps) == 7 and min(sample.gaps) > 0.005
        assert sample.ttft + sum(sample.gaps) <= sample.e2e <= sample.ttft + 8 * 0.2
        assert sample.e2e == pytest.approx(sample.ttft + 7 * sample.tpot)
        assert (sample.prompt_tokens, sample.output_tokens) == (PROMPT_TOKENS, 8)
    assert run.seconds >= max(sample.e2e for sample in run.good)


def test_merged_chunks_lengthen_gaps_and_not_the_time_per_token(
    fake: tuple[SseServer, int],
) -> None:
    body = {"max_tokens": 12, "gap_ms": 30}
    [single], [merged] = load(fake[1], [body]).good, load(fake[1], [body | {"merge": 4}]).good
    assert (len(single.chunks), len(merged.chunks)) == (12, 3)
    assert merged.output_tokens == 12 and merged.tpot is not None
    assert fmean(merged.gaps) > 2 * merged.tpot
    assert single.tpot == pytest.approx(fmean(single.gaps), rel=0.2)


@pytest.mark.parametrize("size", [1, 3, 17])
def test_events_may_come_in_any_pieces(fake: tuple[SseServer, int], size: int) -> None:
    [sample] = load(fake[1], [{"max_tokens": 4, "pieces": size}]).good
    assert len(sample.chunks) == 4 and sample.output_tokens == 4


def test_failures_are_counted_by_kind_and_do_not_end_the_load(fake: tuple[SseServer, int]) -> None:
    bodies: list[dict[str, Any]] = [
        {},
        {"status": 429},
        {"status": 429},
        {"break_after": 2},
        {"error_after": 1},
        {"no_usage": True},
        {"first_ms": 2000},
        {},
    ]
    run = load(fake[1], bodies, timeout=0.8)
    assert run.errors == {
        "HTTP 429": 2, "connection lost": 1, "error in the stream": 1, "no usage": 1, "timeout": 1,
    }  # fmt: skip
    assert len(run.good) == 2
    assert any("not to its liking" in message for message in run.messages)
    run = load(1, [{}])
    assert run.errors == {"no connection": 1} and run.good == []


def test_connections_are_used_again_unless_the_server_closes(fake: tuple[SseServer, int]) -> None:
    server, port = fake
    before = server.connections
    load(port, [{}] * 6, concurrency=1)
    assert server.connections == before + 1
    load(port, [{"close": True}] * 3, concurrency=1)
    assert server.connections == before + 4


def test_the_limit_of_concurrency_holds_and_its_wait_is_apart(fake: tuple[SseServer, int]) -> None:
    server, port = fake
    server.most_flying = 0
    run = load(port, [{"first_ms": 40}] * 9, concurrency=3)
    assert run.most_in_flight == 3
    assert 3 <= server.most_flying <= 4  # its last write may reach us before it has counted down
    held = [sample.sent - sample.due for sample in run.good]
    assert max(held[:3]) < min(held[3:]) and held[6] > 0.07
    assert max(sample.ttft for sample in run.good) < run.seconds
    assert run.lag < min(held[3:])  # being held back is not being late
    point = Point(math.inf, 3, run)
    assert 1 < point.mean_in_flight <= 3.001


def test_requests_start_when_they_are_due(fake: tuple[SseServer, int]) -> None:
    starts = [0.0, 0.05, 0.15, 0.3]
    run = load(fake[1], [{}] * 4, starts)
    first = run.samples[0].due
    assert [sample.due - first for sample in run.samples] == pytest.approx(starts)
    assert all(0 <= sample.sent - sample.due < 0.2 for sample in run.samples)


def test_arrivals_are_a_poisson_process_with_a_fixed_seed() -> None:
    times = arrivals(4000, 5.0, 1)
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps > 0).all()
    assert np.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert np.std(gaps) == pytest.approx(0.2, rel=0.1)  # an exponential's mean is its deviation
    assert times == arrivals(4000, 5.0, 1) and times != arrivals(4000, 5.0, 2)
    assert [t / 2 for t in arrivals(50, 5.0, 3)] == pytest.approx(arrivals(50, 10.0, 3))
    assert arrivals(3, math.inf, 0) == [0.0] * 3


def test_no_prefix_comes_twice_in_a_sweep(fake: tuple[SseServer, int]) -> None:
    server, port = fake
    server.bodies.clear()
    items = tuple(Item(list(range(i, i + 30)), 3) for i in (0, 100))
    workload = Workload("w", 0, items, (Item([7, 8, 9], 2),))

    async def go() -> list[Point]:
        return await sweep(Client(url(port)), Target("m"), workload, [50.0, math.inf], [1, 2])

    points = asyncio.run(go())
    assert [(p.rate, p.concurrency) for p in points] == [
        (50.0, 1), (50.0, 2), (math.inf, 1), (math.inf, 2),
    ]  # fmt: skip
    assert server.bodies[0]["prompt"] == [7, 8, 9]
    prompts = [body["prompt"] for body in server.bodies[1:]]
    assert len({prompt[0] for prompt in prompts}) == len(prompts) == 8
    assert all(sorted(p) in (list(range(30)), list(range(100, 130))) for p in prompts)
    assert all(
        body["stream_options"] == {"include_usage": True} and body["ignore_eos"]
        for body in server.bodies
    )


def test_words_stand_in_for_a_tokenizer() -> None:
    words = Words()
    text = "Of  Light,\nand the\n\nRefraction of the Light"
    ids = words.encode(text)
    assert words.decode(ids) == text and len(ids) == 8 and max(ids) < 8
    workload = make_workload("uniform", words.encode, num_requests=3)
    body = json.loads(Target("m", "chat", words.decode).body(workload.items[0]))
    assert len(body["messages"][0]["content"].split()) == 160


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://h:1", Address("h", 1, False, "/v1")),
        ("http://h:1/v1/", Address("h", 1, False, "/v1")),
        ("https://h/api/v3", Address("h", 443, True, "/api/v3")),
        ("http://[::1]:80", Address("::1", 80, False, "/v1")),
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    assert Address.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["localhost:8000", "ftp://h", "http://", "http://h:x", "http://h/?q=1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Address.parse(text)


def test_an_unknown_path_is_told(fake: tuple[SseServer, int]) -> None:
    async def go() -> None:
        await Client(url(fake[1]) + "/v2").post("/completions", b"{}", lambda *_: None)

    with pytest.raises(TransferError, match=r"HTTP 404: .*no /v2/completions"):
        asyncio.run(go())


def test_the_command_against_a_url(
    fake: tuple[SseServer, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    record, figures = tmp_path / "s.json", tmp_path / "figures"
    fake[0].heads.clear()
    arguments = ["bench", "serve", "--url", url(fake[1]), "--api-key", "k", "--workload", "uniform"]
    arguments += ["--num-requests", "6", "--rate", "60,inf", "--concurrency", "2,6"]
    arguments += ["--api", "chat", "--goodput", "ttft:5000,tpot:1000"]
    arguments += ["--extra-body", '{"first_ms": 5, "max_tokens": 9}']
    main([*arguments, "--json", str(record), "--plot", str(figures)])
    text = capsys.readouterr().out
    assert text.count("TPOT = ") + text.count("(E2E - TTFT) / (output tokens - 1)") == 1
    for word in ("fake, workload uniform", "good/s", "100%", "p99", "ITL", "limits: ttft <= 5000"):
        assert word in text
    assert all("Authorization: Bearer k" in head for head in fake[0].heads)
    found = json.loads(record.read_text())
    assert [(p["rate"], p["concurrency"]) for p in found["points"]] == [
        (60.0, 2), (60.0, 6), ("inf", 2), ("inf", 6),
    ]  # fmt: skip
    for point in found["points"]:
        assert point["output_tokens"] == 6 * 9 and point["errors"] == {}
        assert point["ttft"]["p50"] <= point["ttft"]["p99"] <= point["e2e"]["p99"]
        assert point["goodput_share"] == 1 and point["most_in_flight"] <= point["concurrency"]
    for name in ("ttft_e2e_by_rate", "tpot_itl_by_rate", "throughput_by_concurrency",
                 "ttft_by_throughput"):  # fmt: skip
        for suffix in ("png", "svg"):
            assert (figures / f"{name}.{suffix}").stat().st_size > 5000


def test_the_command_starts_its_own_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from null_engine import load as null_front

    commands: list[list[str]] = []

    def command(arguments: Any, port: int) -> list[str]:
        commands.append(list(arguments))
        return [sys.executable, str(FAKES / "null_server.py"), str(port)]

    monkeypatch.setattr(server_process, "serve_command", command)
    monkeypatch.setattr("octavo.core.entry.front.load_front", null_front)
    record = tmp_path / "s.json"
    arguments = ["bench", "serve", "some/model", "--max-num-seqs", "3", "--workload", "uniform"]
    main([*arguments, "--num-requests", "5", "--json", str(record)])
    assert commands == [["some/model", "--max-num-seqs=3"]]
    [point] = json.loads(record.read_text())["points"]
    assert point["succeeded"] == 5 and point["output_tokens"] == 5 * 64
    assert point["prompt_tokens"] == 5 * 160  # token ids were sent: exactly the workload's
    assert "null, workload uniform" in capsys.readouterr().out


def test_the_servers_key_is_the_clients() -> None:
    command = server_process.serve_command(["some/model", "--threads=2"], 1234)
    serve = command.index("serve")
    assert command[serve + 1 : serve + 3] == ["some/model", "--threads=2"]
    options = dict(zip(command[serve + 3 :: 2], command[serve + 4 :: 2], strict=True))
    assert options == {
        "--host": "127.0.0.1", "--port": "1234", "--api-key": server_process.API_KEY,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--rate", "0"], 2, "above 0"),
        (["--concurrency", "1,x"], 2, "at least 1"),
        (["--goodput", "ttft"], 2, "ttft:500"),
        (["--goodput", "itl:5"], 2, "ttft:500"),
        (["--extra-body", "[1]"], 2, "JSON object"),
        (["--api-key", "x"], 2, "--api-key needs --url"),
        (["--url", "localhost"], 2, "--url must be"),
        (["--url", "http://127.0.0.1:1", "--threads", "2"], 2, "--threads=2: options of an engine"),
        (["--url", "http://127.0.0.1:1", "--num-requests", "2"], 1, "no connection to 127.0.0.1:1"),
        (["--url", "http://127.0.0.1:1", "m", "--num-requests", "2"], 1, "no request succeeded"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", *arguments])
    error = capsys.readouterr().err
    assert caught.value.code == code and words in error and "Traceback" not in error
