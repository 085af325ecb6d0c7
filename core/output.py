"""From the engine's token ids to what a caller sees: text, stop strings, logprobs, samples merged.

This runs beside the engine, never inside its step: in the caller's thread for `LLM`, in the
server's process for `AsyncLLM`. Work per token does not grow with the length of the output, except
for `RequestOutputKind.CUMULATIVE`, whose callers ask for a copy of everything at each step.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

import msgspec

from octavo.core.detokenizer import Detokenizer
from octavo.core.loading.tokenizer import Tokenizer
from octavo.core.params import RequestOutputKind, SamplingParams
from octavo.core.request_stats import RequestStats, worst
from octavo.core.stop import StopChecker
from octavo.core.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    LogprobsAt,
    RequestOutput,
    SequenceUpdate,
    Timings,
    TokenLogprobs,
)

SampleId = tuple[str, int]
"""(request id, index of the sample): what `Engine.abort` takes to end one sample of n."""


def logprobs_at(entry: TokenLogprobs, names: Tokenizer) -> LogprobsAt:
    """One position as vLLM's dict: the chosen token first, then the most likely, no id twice."""
    text = names.token_text
    result = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for rank, (token, logprob) in enumerate(
        zip(entry.top_ids, entry.top_logprobs, strict=True), start=1
    ):
        if token not in result:
            result[token] = Logprob(logprob, rank, text(token))
    return result


class _Sample:
    """One sample of a request while it grows. `fresh_*` is what no output has carried yet."""

    __slots__ = (
        "count",
        "cumulative",
        "cumulative_known",
        "detokenizer",
        "dirty",
        "finish_reason",
        "fresh_ids",
        "fresh_logprobs",
        "fresh_text",
        "ids",
        "index",
        "logprobs",
        "min_tokens",
        "score",
        "stop_reason",
        "stops",
        "text",
        "timings",
        "unread",
    )

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        params: SamplingParams,
        shown_special: Collection[int],
        at_end: bool,
    ) -> None:
        self.index = index
        self.detokenizer = (
            Detokenizer.of(tokenizer, prompt_ids, params, shown_special)
            if params.detokenize
            else None
        )
        self.stops = (
            StopChecker(params.stops, params.include_stop_str_in_output) if params.stops else None
        )
        # Tokens whose text nobody asks for before the last of them, where no stop string has to be found in it.
        self.unread: list[int] | None = [] if at_end and self.stops is None else None
        self.min_tokens = params.min_tokens
        self.count = 0
        self.ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[LogprobsAt] | None = None if params.logprobs is None else []
        self.fresh_ids: list[int] = []
        self.fresh_text: list[str] = []
        self.fresh_logprobs: list[LogprobsAt] = []
        self.cumulative = 0.0
        self.cumulative_known = params.logprobs is not None or params.use_beam_search
        self.score: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.dirty = False
        self.timings: Timings | None = None

    def apply(self, update: SequenceUpdate, names: Tokenizer, hide_stop_token: bool) -> bool:
        """Takes one update; True when a stop string ended the sample before the engine did."""
        self.dirty = True
        ids, used, matched = update.token_ids, len(update.token_ids), None
        # A beam that a stop string ended has that as its reason, and all its text is told here.
        stopped = update.finish_reason == "stop" and not isinstance(update.stop_reason, str)
        if self.detokenizer is not None:
            # The token that made the engine stop is counted but is no part of the text.
            shown = ids[:-1] if stopped and hide_stop_token else ids
            if self.unread is not None:
                self.unread += shown
            elif self.stops is None:
                self.fresh_text.append(self.detokenizer.push(shown))
            else:
                used, matched = self._push_until_stop(shown, len(ids))
            if matched is None and update.finish_reason is not None:
                matched = self._flush()
        self.count += used
        self.fresh_ids.extend(ids[:used])
        if update.logprobs:
            for entry in update.logprobs[:used]:
                self.cumulative += entry.logprob
                if self.logprobs is not None:
                    self.fresh_logprobs.append(logprobs_at(entry, names))
        if update.cumulative is not None:
            self.cumulative, self.score = update.cumulative, update.score
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
            return update.finish_reason is None
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        return False

    def _push_until_stop(self, shown: list[int], total: int) -> tuple[int, str | None]:
        """(tokens used, stop string found). A stop string counts when it lies wholly behind the
        first `min_tokens` tokens."""
        assert self.detokenizer is not None and self.stops is not None
        for position, token in enumerate(shown, start=1):
            text, matched = self.stops.push(
                self.detokenizer.push([token]), check=self.count + position > self.min_tokens
            )
            self.fresh_text.append(text)
            if matched is not None:
                return position, matched
        return total, None

    def _flush(self) -> str | None:
        assert self.detokenizer is not None
        if self.unread:
            self.fresh_text.append(self.detokenizer.push(self.unread))
        rest = self.detokenizer.flush()
        if self.stops is None:
            self.fresh_text.append(rest)
            return None
        matched = None
        if rest:
            text, matched = self.stops.push(rest)
            self.fresh_text.append(text)
        if matched is None:
            self.fresh_text.append(self.stops.flush())
        return matched

    def take(self, kind: RequestOutputKind) -> CompletionOutput:
        """The output for the caller; what it carries is no longer fresh."""
        self.dirty = False
        ids: Sequence[int]
        if kind is RequestOutputKind.DELTA:
            text, ids = "".join(self.fresh_text), self.fresh_ids
            logprobs = self.fresh_logprobs if self.logprobs is not None else None
        else:
            self.ids += self.fresh_ids
            self.text += self.fresh_text
            if self.logprobs is not None:
                self.logprobs += self.fresh_logprobs
            text = "".join(self.text)
            ids, logprobs = self.ids, self.logprobs
            if kind is RequestOutputKind.CUMULATIVE:
                self.text = [text]
                ids = list(ids)
                logprobs = None if logprobs is None else list(logprobs)
        self.fresh_ids, self.fresh_text, self.fresh_logprobs = [], [], []
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=ids,
            cumulative_logprob=self.cumulative if self.cumulative_known else None,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            score=self.score,
        )


class _Entry:
    __slots__ = (
        "begun",
        "best_of",
        "cached",
        "cut",
        "embedding",
        "external_id",
        "ids",
        "kind",
        "last_output",
        "open",
        "params",
        "prompt",
        "prompt_logprobs",
        "received",
        "samples",
        "timings",
    )

    def __init__(
        self,
        external_id: str,
        prompt: str | None,
        ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        shown_special: Collection[int],
    ) -> None:
        self.external_id = external_id
        self.prompt = prompt
        self.ids = ids
        self.params = params
        self.kind = params.output_kind
        # Of more samples than are asked for the best are given out, when all have ended.
        self.best_of = params.width > params.n and not params.use_beam_search
        count = params.width if self.best_of else params.n
        if self.best_of:
            self.kind = RequestOutputKind.FINAL_ONLY
        at_end = self.kind is RequestOutputKind.FINAL_ONLY
        self.samples = [
            _Sample(i, tokenizer, ids, params, shown_special, at_end) for i in range(count)
        ]
        self.open = count
        self.prompt_logprobs: list[LogprobsAt | None] | None = None
        self.cached = 0
        self.cut = False  # a stop string ended a sample
        self.embedding: bytes | None = None
        self.timings: Timings | None = None
        self.begun = False  # something of it came
        self.received = self.last_output = time.monotonic()


def _joined_timings(samples: list[_Sample], newest: Timings) -> Timings:
    """A request's timings: the newest of its samples', with all samples' preemptions."""
    if len(samples) == 1:
        return newest
    known = [sample.timings for sample in samples if sample.timings is not None]
    return msgspec.structs.replace(
        newest,
        num_preemptions=sum(timings.num_preemptions for timings in known),
        num_swaps=sum(timings.num_swaps for timings in known),
        num_recomputed_tokens=sum(timings.num_recomputed_tokens for timings in known),
        num_drafted_tokens=sum(timings.num_drafted_tokens for timings in known),
        num_accepted_tokens=sum(timings.num_accepted_tokens for timings in known),
        peak_blocks=max(timings.peak_blocks for timings in known),
        peak_logical_blocks=max(timings.peak_logical_blocks for timings in known),
    )


class OutputProcessor:
    """Turns the engine's `SequenceUpdate`s into `RequestOutput`s, for any number of requests.

    Not thread-safe: it belongs to whoever drives the engine or reads its messages.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._open: dict[str, _Entry] = {}
        self.stats = RequestStats()
        self.num_unbegun = 0  # requests of which nothing came yet

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        external_id: str | None = None,
        shown_special: Collection[int] = (),
    ) -> None:
        """Expects updates for `request_id`. Outputs carry `external_id`, the caller's own name for
        the request, which need not be unique. shown_special: special tokens that are text even with
        `skip_special_tokens`."""
        assert request_id not in self._open
        self._open[request_id] = _Entry(
            external_id or request_id,
            prompt,
            prompt_token_ids,
            params,
            self._tokenizer,
            shown_special,
        )
        self.num_unbegun += 1
        self.stats.on_received(params)

    def discard(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Forgets a request; later updates for it are dropped. What was open of it counts as ended
        for `reason`."""
        entry = self._open.pop(request_id, None)
        if entry is None:
            return
        self.num_unbegun -= not entry.begun
        self.stats.samples_finished[reason] += entry.open
        for sample in entry.samples:
            sample.finish_reason = sample.finish_reason or reason
        self._close(entry, time.monotonic())

    def process(
        self, updates: Iterable[SequenceUpdate]
    ) -> tuple[list[tuple[str, RequestOutput]], list[SampleId]]:
        """One step's updates.

        Returns the outputs due, each with its internal request id, and the samples that a stop
        string ended, which the engine must abort. Updates of requests that are not open and of
        samples that have ended are dropped.
        """
        touched: dict[str, _Entry] = {}
        aborts: list[SampleId] = []
        now = time.monotonic()
        for update in updates:
            entry = self._open.get(update.request_id)
            if entry is None:
                continue
            if update.beams is not None:  # fewer than were asked for
                entry.open -= len(entry.samples) - update.beams
                del entry.samples[update.beams :]
            sample = entry.samples[update.index]
            if sample.finish_reason is not None:
                continue
            before = sample.count
            if sample.apply(update, self._tokenizer, not entry.params.include_stop_str_in_output):
                aborts.append((update.request_id, update.index))
                entry.cut = True
            self._count(entry, before, sample.count, now)
            # `apply` may have ended it; the type-checker still sees the None from above.
            ended: FinishReason | None = sample.finish_reason
            if ended is not None:
                entry.open -= 1
                self.stats.samples_finished[ended] += 1
            if update.prompt_logprobs is not None:
                entry.prompt_logprobs = [None]
                entry.prompt_logprobs += [
                    logprobs_at(e, self._tokenizer) for e in update.prompt_logprobs
                ]
            entry.cached = max(entry.cached, update.num_cached_tokens)
            if update.timings is not None:
                sample.timings = update.timings
                if update.embedding is not None:
                    entry.embedding = update.embedding
                    self.stats.embeddings += 1
                entry.timings = _joined_timings(entry.samples, update.timings)
            touched[update.request_id] = entry
        outputs = []
        for request_id, entry in touched.items():
            entry.last_output = now
            if entry.open == 0:
                del self._open[request_id]
                self._close(entry, now)
            if (output := self._output(entry)) is not None:
                outputs.append((request_id, output))
        return outputs, aborts

    def _count(self, entry: _Entry, before: int, after: int, now: float) -> None:
        """One sample has `after` tokens, and had `before`."""
        stats, tokens = self.stats, after - before
        stats.generation_tokens += tokens
        if before and tokens:
            stats.inter_token.observe((now - entry.last_output) / tokens, tokens)
        if not entry.begun:
            entry.begun = True
            self.num_unbegun -= 1
            stats.prompt_tokens += len(entry.ids)
            if tokens:
                stats.first_token.observe(now - entry.received)

    def _close(self, entry: _Entry, now: float) -> None:
        timings = entry.timings
        if timings is not None and entry.cut:
            # The engine did not know that this was the end, so its last word is an earlier token's.
            # The monotonic clock is one for all processes of a machine.
            timings = msgspec.structs.replace(timings, last_token=now, finished=now)
            entry.timings = timings
        self.stats.on_finished(
            worst(sample.finish_reason or "abort" for sample in entry.samples),
            timings,
            now - entry.received,
            len(entry.ids),
            [sample.count for sample in entry.samples],
        )

    @staticmethod
    def _output(entry: _Entry) -> RequestOutput | None:
        kind, finished = entry.kind, entry.open == 0
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        samples: Iterable[_Sample] = entry.samples
        if entry.best_of:
            ranked = sorted(entry.samples, key=lambda s: -s.cumulative)[: entry.params.n]
            for index, sample in enumerate(ranked):
                sample.index, sample.cumulative_known = index, True
            samples = ranked
        if kind is RequestOutputKind.DELTA:
            samples = [s for s in entry.samples if s.dirty]
        prompt_logprobs = entry.prompt_logprobs
        if kind is RequestOutputKind.DELTA:
            entry.prompt_logprobs = None
        return RequestOutput(
            request_id=entry.external_id,
            prompt=entry.prompt,
            prompt_token_ids=entry.ids,
            outputs=[s.take(kind) for s in samples],
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=entry.cached,
            metrics=entry.timings,
            embedding=entry.embedding,
        )


def merge_outputs(outputs: list[RequestOutput], kind: RequestOutputKind) -> RequestOutput:
    """Outputs of one request that its caller has not fetched yet, oldest first, as one.

    The last CUMULATIVE output stands for all; DELTAs are joined sample by sample.
    """
    last = outputs[-1]
    if kind is not RequestOutputKind.DELTA or len(outputs) == 1:
        return last
    samples: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for sample in output.outputs:
            samples.setdefault(sample.index, []).append(sample)
    return RequestOutput(
        request_id=last.request_id,
        prompt=last.prompt,
        prompt_token_ids=last.prompt_token_ids,
        outputs=[_joined(samples[index]) for index in sorted(samples)],
        finished=last.finished,
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs), None),
        num_cached_tokens=last.num_cached_tokens,
        metrics=last.metrics,
    )


def _joined(parts: list[CompletionOutput]) -> CompletionOutput:
    last = parts[-1]
    return CompletionOutput(
        index=last.index,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        cumulative_logprob=last.cumulative_logprob,
        logprobs=(
            None
            if last.logprobs is None
            else [entry for part in parts for entry in part.logprobs or ()]
        ),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        score=last.score,
    )
