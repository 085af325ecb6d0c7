"""Several prompts of one HTTP request, run side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Sequence

from octavo.core.entry.async_llm import AsyncLLM
from octavo.core.entry.inputs import Prompt
from octavo.core.params import SamplingParams
from octavo.core.types import RequestOutput

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]


async def run_all(
    llm: AsyncLLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    priority: int,
    cache_salt: str | None,
    shown_special: Collection[int] = (),
) -> Outputs:
    """(index of the prompt, output) as they come. One prompt's failure, or leaving the loop, ends
    all of them."""
    streams = [
        llm.generate(
            prompt, params, priority=priority, cache_salt=cache_salt, shown_special=shown_special
        )
        for prompt in prompts
    ]
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_pump(i, s, queue)) for i, s in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= item.finished
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int,
    stream: AsyncGenerator[RequestOutput, None],
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception]],
) -> None:
    try:
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                queue.put_nowait((index, output))
    except Exception as error:
        queue.put_nowait((index, error))
