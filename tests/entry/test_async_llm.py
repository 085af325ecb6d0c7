"""`AsyncLLM`: the null engine in its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from null_engine import load

from octavo import AsyncLLM, SamplingParams
from octavo.core.config import ConfigError, EngineConfig
from octavo.core.entry.engine_client import EngineDeadError
from octavo.core.params import ParamError, RequestOutputKind, RequestRefused

DELTA = RequestOutputKind.DELTA
FINAL = RequestOutputKind.FINAL_ONLY
LONG = SamplingParams(max_tokens=3000, output_kind=DELTA)


def with_llm(body: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        async with make(**options) as llm:
            async with asyncio.timeout(20):
                return await body(llm)

    return asyncio.run(run())


def make(model: str = "null", progress: Any = None) -> AsyncLLM:
    config = EngineConfig(model=model, max_model_len=4096, load_progress=False)
    return AsyncLLM.from_config(config, factory="null_engine:build", loader=load, progress=progress)


async def text_of(llm: AsyncLLM, prompt: Any, **params: Any) -> str:
    text = ""
    options = {"max_tokens": 100, "output_kind": DELTA, **params}
    async for output in llm.generate(prompt, SamplingParams(**options)):
        text += "".join(sample.text for sample in output.outputs)
    return text


def test_streams_side_by_side() -> None:
    async def body(llm: AsyncLLM) -> None:
        texts = [f"number {i} of many" for i in range(50)]
        assert await asyncio.gather(*(text_of(llm, f"say:{t}") for t in texts)) == texts
        assert llm.num_open == 0

    with_llm(body)


def test_the_parent_imports_no_torch() -> None:
    code = """
        import asyncio, sys, null_engine
        from octavo import AsyncLLM
        from octavo.core.config import EngineConfig
        async def main():
            llm = AsyncLLM.from_config(
                EngineConfig(), factory="null_engine:build", loader=null_engine.load)
            async with llm:
                async for _ in llm.generate("say:x"): pass
        asyncio.run(main())
        assert "torch" not in sys.modules
    """
    # No __main__ guard, and the child is gone with its parent.
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)


def test_leaving_the_loop_or_cancelling_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULL_ENGINE_STEP_SECONDS", "0.001")

    async def body(llm: AsyncLLM) -> None:
        async def read_one() -> None:
            stream = llm.generate("x", LONG)
            async for _ in stream:
                break
            await stream.aclose()

        await read_one()
        task = asyncio.create_task(text_of(llm, "x", max_tokens=3000))
        await asyncio.sleep(0.05)
        assert (await llm.stats())["running"] == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await llm.stats())["running"] == 0
        assert llm.num_open == 0

    with_llm(body)


def test_abort_by_name_ends_with_a_last_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are the callers', and two requests may share one."""
    monkeypatch.setenv("NULL_ENGINE_STEP_SECONDS", "0.001")

    async def body(llm: AsyncLLM) -> None:
        async def reason(name: str) -> Any:
            async for output in llm.generate("x", LONG, request_id=name):
                assert output.request_id == name
                last = output.outputs[0].finish_reason
            return last

        tasks = [asyncio.create_task(reason(name)) for name in ("a", "a", "b")]
        await asyncio.sleep(0.05)
        await llm.abort("a")
        await llm.abort("nobody")
        assert await asyncio.gather(*tasks[:2]) == ["abort", "abort"]
        assert not tasks[2].done()
        await llm.abort("b")
        assert await tasks[2] == "abort"

    with_llm(body)


def test_refusals_come_back_as_themselves() -> None:
    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(RequestRefused, match="needs 9 KV blocks"):
            await text_of(llm, "refuse me")
        with pytest.raises(ParamError, match="liking") as caught:
            await text_of(llm, "bad param")
        assert caught.value.param == "top_k" and type(caught.value) is ParamError
        with pytest.raises(ParamError, match="4096"):
            await text_of(llm, [40] * 5000)
        assert await text_of(llm, "say:fine") == "fine"

    with_llm(body)


def test_a_slow_reader_gets_everything_merged() -> None:
    async def body(llm: AsyncLLM) -> None:
        outputs = []
        params = SamplingParams(max_tokens=500, output_kind=DELTA, logprobs=0)
        async for output in llm.generate("x", params):
            outputs.append(output)
            await asyncio.sleep(0.02)
        assert len(outputs) < 100
        assert sum(len(o.outputs[0].token_ids) for o in outputs) == 500
        assert sum(len(o.outputs[0].logprobs or ()) for o in outputs) == 500

    with_llm(body)


def test_stop_strings_end_one_sample_in_the_engine_too() -> None:
    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(n=2, max_tokens=3000, stop="fox", output_kind=FINAL)
        async for output in llm.generate("x", params):
            assert [s.text for s in output.outputs] == ["The quick brown "] * 2
        assert (await llm.stats())["running"] == 0

    with_llm(body)


@pytest.mark.parametrize("cause", ["crash now", "raise now", "kill"])
def test_when_the_engine_dies_every_request_fails(cause: str) -> None:
    async def body(llm: AsyncLLM) -> None:
        others = [asyncio.create_task(text_of(llm, "x", max_tokens=4000)) for _ in range(3)]
        statistics = asyncio.create_task(llm.stats())
        await asyncio.sleep(0)
        if cause == "kill":
            assert llm.engine_pid is not None
            os.kill(llm.engine_pid, signal.SIGKILL)
            match = r"unexpectedly \(signal 9"
        else:
            others.append(asyncio.create_task(text_of(llm, cause)))
            match = r"exit code 7" if cause == "crash now" else "FloatingPointError"
        for result in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
        await asyncio.gather(statistics, return_exceptions=True)
        with pytest.raises(EngineDeadError, match=match):
            llm.check_health()
        with pytest.raises(EngineDeadError, match=match):
            await text_of(llm, "say:hi")
        assert not llm.is_running

    with_llm(body)


def test_shutdown_fails_open_requests_and_leaves_no_process() -> None:
    async def body() -> None:
        llm = make()
        await llm.start()
        pid = llm.engine_pid
        task = asyncio.create_task(text_of(llm, "x", max_tokens=4000))
        await asyncio.sleep(0.01)
        await llm.shutdown()
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        assert pid is not None and not os.path.exists(f"/proc/{pid}")

    asyncio.run(body())


def test_a_configuration_that_cannot_be_used() -> None:
    async def body() -> None:
        llm = make("no-such-model")
        with pytest.raises(ConfigError, match="no model of that name"):
            await llm.start()
        with pytest.raises(EngineDeadError):
            llm.check_health()

    asyncio.run(body())


def test_cancelling_the_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULL_ENGINE_LOAD_SECONDS", "30")

    async def body() -> None:
        llm = make()
        task = asyncio.create_task(llm.start())
        while llm.engine_pid is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert llm.engine_pid is not None and not os.path.exists(f"/proc/{llm.engine_pid}")

    asyncio.run(body())


def test_the_child_dies_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULL_ENGINE_LOAD_SECONDS", "30")  # it is busy, and reads no messages
    code = """
        import asyncio, null_engine
        from octavo.core.config import EngineConfig
        from octavo import AsyncLLM
        async def main():
            llm = AsyncLLM.from_config(
                EngineConfig(), factory="null_engine:build", loader=null_engine.load)
            task = asyncio.ensure_future(llm.start())
            while llm.engine_pid is None:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            print(llm.engine_pid, flush=True)
            await task
        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    async def gone() -> None:
        async with asyncio.timeout(5):
            while _alive(pid):
                await asyncio.sleep(0.02)

    asyncio.run(gone())


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_phases_are_forwarded() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def task(self, description: str, total: int | None) -> Any:
            self.seen.append((description, total))
            return self

        def advance(self, n: int) -> None:
            self.seen.append(n)

        def close(self) -> None:
            self.seen.append("closed")

    recorder = Recorder()

    async def body(llm: AsyncLLM) -> None:
        assert recorder.seen == [("loading nothing", 10), 10, "closed"]
        assert llm.info.phases == {"weights": 0.01}

    with_llm(body, progress=recorder)


def test_long_text_is_tokenised_beside_the_loop() -> None:
    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(ParamError, match="100001 tokens"):
            await text_of(llm, "x" * 100_000)

    with_llm(body)
