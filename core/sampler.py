"""Logits -> tokens: what a request asked for, applied to a whole batch at once.

Order, as in vLLM: allowed tokens, bad words, min_tokens and logit_bias, then penalties, then
temperature, top-k, top-p and min-p, then the draw. Log-probabilities are taken from the raw logits,
before any of it. A request's random bits depend on (its seed, the index of its output token, the
vocabulary id) alone, so not on its batch-mates, on chunking or on preemption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from octavo.core.bad_words import BadWords, VocabularyIndex
from octavo.core.batch import prompt_logprob_rows
from octavo.core.beam_candidates import beam_candidates, forked
from octavo.core.contract import Ops, SampleInputs
from octavo.core.guesses import Guess, settle
from octavo.core.logit_changes import Penalties, change_logits, id_array, index_at
from octavo.core.sequence import Ahead
from octavo.core.sequence import Sequence as Seq
from octavo.core.structured import Grammars
from octavo.core.types import Int64, ScheduledTokens, StepPlan, StepResult, TokenLogprobs

_SLICE = 64  # rows of prompt logits normalised at a time: bounds the memory of a float32 copy


class DrawState:
    """A sequence's parameters, prepared once: what changes its logits, and how it draws."""

    def __init__(
        self,
        sequence: Seq,
        vocabulary: Callable[[bool], VocabularyIndex],
        grammars: Grammars | None = None,
    ) -> None:
        params, request = sequence.request.params, sequence.request
        self.allowed = (
            id_array(params.allowed_token_ids) if params.allowed_token_ids is not None else None
        )
        self.bias = params.logit_bias or None
        self.bias_ids = id_array(list(self.bias)) if self.bias else None
        stops = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops.update(request.eos_token_ids)
        self.early = id_array(sorted(stops)) if params.min_tokens and stops else None
        self.bad_words: BadWords | None = None
        if params.bad_words:
            words = [word.encode() for word in params.bad_words]
            self.bad_words = BadWords(
                words, vocabulary(params.skip_special_tokens), request.prompt_token_ids
            )
        penalised = (
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )
        self.penalties = Penalties(sequence) if penalised else None
        structured = params.structured_outputs
        self.grammar = grammars.state(structured) if structured and grammars else None
        others = (self.allowed, self.bias, self.early, self.bad_words, self.penalties)
        self.changes_without_grammar = any(x is not None for x in others)
        self.changes_logits = self.changes_without_grammar or self.grammar is not None
        self.logprobs = params.logprobs
        if self.logprobs is None and params.width > params.n and not params.use_beam_search:
            self.logprobs = 0  # the best samples are those whose sum is the highest
        self.beams = params.width if params.use_beam_search else 0
        self.ends = len(stops)
        self.greedy = params.greedy
        self.temperature = 0.0 if params.greedy else params.temperature
        self.top_k, self.top_p, self.min_p = max(0, params.top_k), params.top_p, params.min_p
        # The most likely of the raw logits, and nothing else: the same whoever the sequence is.
        self.plain = self.greedy and not self.changes_logits and self.logprobs is None
        self.plain = self.plain and not self.beams
        # Drawn first, and put to its grammar then: `octavo.core.guesses`. Whether a text that is too short
        # may end all the same is seen from the mask.
        guesses = self.greedy and not self.beams and self.early is None
        self.guessed = self.grammar if guesses else None

    def fork(self) -> DrawState:
        """The state of a beam that begins as this one."""
        return forked(self)


class _Neutral:
    """How a row is drawn whose token nobody wants: the cheapest way."""

    greedy = True
    temperature, top_k, top_p, min_p = 0.0, 0, 1.0, 0.0


_NEUTRAL = _Neutral()
Drawing = DrawState | _Neutral


def sample_program(ops: Ops) -> Callable[[torch.Tensor, SampleInputs], torch.Tensor]:
    """The whole draw as one program, for devices that run nothing else: logits [L, V] of any float
    dtype to tokens [L], -1 also where the drawn logit is not finite."""

    def sample(logits: torch.Tensor, rows: SampleInputs) -> torch.Tensor:
        wide = logits.float()
        picked = ops.sample(wide, rows)
        finite = wide.gather(1, picked.clamp_min(0)[:, None])[:, 0].isfinite()
        return torch.where(finite, picked, -1)

    return sample


class Sampler:
    """Draws a step's tokens.

    Args:
        sample: the compiled sample program, (logits [L, V] float32, SampleInputs) -> tokens [L].
        ops: the device's ops.
        device: torch device of the logits.
        vocabulary: skip_special -> the vocabulary's bytes; called only for bad_words.
        grammars: those of structured output.
    """

    def __init__(
        self,
        sample: Callable[[torch.Tensor, SampleInputs], torch.Tensor],
        ops: Ops,
        device: str,
        vocabulary: Callable[[bool], VocabularyIndex],
        grammars: Grammars | None = None,
    ) -> None:
        self._grammars = grammars
        self._sample = sample
        self._ops = ops
        self._device = device
        self._vocabulary = vocabulary
        self._greedy: dict[int, SampleInputs] = {}  # by number of rows
        # By lane: whose inputs these are, a row each, and the inputs.
        self._inputs: dict[int, tuple[list[Drawing], SampleInputs]] = {}

    def run(self, plan: StepPlan, logits: torch.Tensor, num_rows: int | None = None) -> StepResult:
        """logits [L, V] belong to `Batch.logits_rows`: rows to draw from, then prompt rows.

        num_rows: how many are no padding, where they are padded; then all are drawn from.
        """
        items = [item for item in plan.items if item.samples]
        count = sum([item.samples for item in items])
        size = count if num_rows is None else len(logits)
        drawn = logits[:size]
        prompt: dict[str, list[TokenLogprobs]] = {}
        rows = len(logits) if num_rows is None else num_rows
        if rows > count:
            prompt = self._prompt_logprobs(plan, logits[count:rows])
        if not count:
            return StepResult(tokens=np.zeros(0, np.int64), prompt_logprobs=prompt)
        if drawn.dtype != torch.float32:
            drawn = drawn.float()
        states = [self._state(item.sequence) for item in items]
        if len([state for state in states if state.plain]) == len(states):
            tokens = self._draw(drawn, self._greedy_inputs(size))[:count]
            return StepResult(tokens=tokens, prompt_logprobs=prompt)
        if count > len(items):
            states = [s for s, item in zip(states, items, strict=True) for _ in range(item.samples)]
        sequences: list[Seq | Ahead] = []
        for item in items:
            if item.drafts:
                sequences.append(item.sequence)
                sequences.extend(Ahead(item.sequence, k) for k in range(1, item.samples))
            else:
                sequences.extend([item.sequence] * item.samples)
        wanted = [i for i, state in enumerate(states) if state.logprobs is not None]
        guesses = self._guesses(items, states)
        guessed = {i for guess in guesses for i in range(guess.row, guess.end)}
        changed = [
            i
            for i, state in enumerate(states)
            if state.changes_without_grammar or (state.changes_logits and i not in guessed)
        ]
        beams = [i for i, state in enumerate(states) if state.beams]
        if beams:  # what changes logits changes log-probabilities here, which are not normed again
            drawn[beams] = torch.log_softmax(drawn[beams], dim=-1)
        raw = drawn
        if changed:
            raw = drawn.clone() if wanted else drawn
            change_logits(self._ops, drawn, sequences, states, changed, guessed)
        inputs = self._sample_inputs(plan.lane, items, sequences, states, size)
        tokens = self._draw(drawn, inputs)[:count]
        if guesses:
            settle(self._ops, drawn, tokens, guesses)
        logprobs: list[TokenLogprobs | None] = []
        candidates = {i: beam_candidates(drawn[i], raw[i], states[i]) for i in beams}
        if beams:
            wanted = [i for i in wanted if not states[i].beams]
        if wanted:
            logprobs = [None] * count
            counts = [states[i].logprobs or 0 for i in wanted]
            chosen = raw[:count] if len(wanted) == count else raw[index_at(wanted, raw)]
            for i, entry in zip(
                wanted, token_logprobs(chosen, tokens[wanted], counts, self._ops), strict=True
            ):
                logprobs[i] = entry
                if math.isnan(entry.logprob) or math.isnan(sum(entry.top_logprobs)):
                    tokens[i] = -1  # the fault lies in logits that parameters had masked
        found = {i: found for i, found in candidates.items() if found is not None}
        return StepResult(tokens, logprobs, prompt, found)

    def _guesses(self, items: list[ScheduledTokens], states: list[DrawState]) -> list[Guess]:
        """The rows to draw without their grammars at first."""
        found: list[Guess] = []
        if self._device != "cpu":
            return found
        row = 0
        for item in items:
            grammar, end = states[row].guessed, row + item.samples
            if grammar is not None:
                sequence: Seq = item.sequence
                if item.drafts:
                    known = sequence.num_tokens
                    drafts = sequence.tokens[known : known + item.drafts].tolist()
                    found.append(Guess(row, end, sequence, grammar, drafts))
                elif (
                    item.samples == 1
                ):  # several samples' first tokens follow one and the same state
                    found.append(Guess(row, end, sequence, grammar))
            row = end
        return found

    def warm_up(self, logits: torch.Tensor) -> None:
        """Runs the program once for greedy rows alone and once as other rows have it, on these logits
        of whatever value."""
        greedy = self._greedy_inputs(len(logits))
        for inputs in (greedy, replace(greedy, all_greedy=False)):
            self._sample(self._for_program(logits), inputs).cpu()

    def _for_program(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits in the dtype that the program takes."""
        return logits.float()

    def _draw(self, logits: torch.Tensor, inputs: SampleInputs) -> Int64:
        picked = self._sample(logits, inputs)
        if self._ops.draws_finite:
            found: Int64 = picked.cpu().numpy()
            return found
        if picked.device.type == "cpu":
            # One by one: torch takes longer for these few numbers than the draw does.
            value, drawn = logits.numpy().item, picked.tolist()
            return np.array(
                [t if t >= 0 and math.isfinite(value(i, t)) else -1 for i, t in enumerate(drawn)],
                np.int64,
            )
        finite = logits.gather(1, picked.clamp_min(0)[:, None])[:, 0].isfinite()
        tokens: Int64 = torch.where(finite, picked, -1).cpu().numpy()
        return tokens

    def _state(self, sequence: Seq) -> DrawState:
        if sequence.draw_state is None:
            sequence.draw_state = DrawState(sequence, self._vocabulary, self._grammars)
        state: DrawState = sequence.draw_state
        return state

    def _up(self, values: Any, dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype)).to(self._device)

    def _greedy_inputs(self, count: int) -> SampleInputs:
        """What greedy rows draw by, whosever they are: made once for each number of rows."""
        inputs = self._greedy.get(count)
        if inputs is None:
            zeros = [0] * count
            inputs = self._greedy[count] = SampleInputs(
                temperature=self._up(zeros, np.float32),
                top_k=self._up(zeros, np.int32),
                top_p=self._up([1] * count, np.float32),
                min_p=self._up(zeros, np.float32),
                seed=self._up(zeros, np.int64),
                counter=self._up(zeros, np.int64),
                all_greedy=True,
            )
        return inputs

    def _sample_inputs(
        self,
        lane: int,
        items: list[ScheduledTokens],
        sequences: Sequence[Seq | Ahead],
        states: Sequence[Drawing],
        size: int,
    ) -> SampleInputs:
        """What each of `size` rows draws by, those behind `states` as padding. From one decode step of a
        lane to the next only the counter moves."""
        padding = size - len(states)
        if len([state for state in states if state.greedy]) == len(states):
            return self._greedy_inputs(size)
        counter = self._up([s.num_output for s in sequences] + [0] * padding, np.int64)
        states = [*states, *[_NEUTRAL] * padding]
        # A sequence draws for its siblings in one step only, so equal rows have equal seeds.
        drawn_by, inputs = self._inputs.get(lane, ([], None))
        drafts = sum([item.drafts for item in items]) > 0
        if inputs is not None and states == drawn_by and not drafts:
            return replace(inputs, counter=counter)
        seeds = [
            item.sequence.sample_seed(0 if item.drafts else k)
            for item in items
            for k in range(item.samples)
        ]
        inputs = SampleInputs(
            temperature=self._up([state.temperature for state in states], np.float32),
            top_k=self._up([state.top_k for state in states], np.int32),
            top_p=self._up([state.top_p for state in states], np.float32),
            min_p=self._up([state.min_p for state in states], np.float32),
            seed=self._up(np.array(seeds + [0] * padding, np.uint64).view(np.int64), np.int64),
            counter=counter,
        )
        if not drafts:  # whose rows are no siblings
            self._inputs[lane] = states, inputs
        return inputs

    # --------------------------------------------------------------------------- log-probabilities

    def _prompt_logprobs(
        self, plan: StepPlan, logits: torch.Tensor
    ) -> dict[str, list[TokenLogprobs]]:
        found: dict[str, list[TokenLogprobs]] = {}
        row = 0
        for item in plan.items:
            if not item.all_logits:
                continue
            sequence: Seq = item.sequence
            positions = prompt_logprob_rows(item)
            wanted = sequence.request.params.prompt_logprobs or 0
            following = sequence.tokens[positions.start + 1 : positions.stop + 1].astype(np.int64)
            entries: list[TokenLogprobs] = []
            for at in range(0, len(positions), _SLICE):
                end = min(at + _SLICE, len(positions))
                part = logits[row + at : row + end].float()
                entries.extend(
                    token_logprobs(part, following[at:end], [wanted] * (end - at), self._ops)
                )
            found[sequence.request.id] = entries
            row += len(positions)
        return found


class StaticSampler(Sampler):
    """Draws where a device runs compiled programs of fixed shapes and nothing else.

    Requests that take logits as they are and want no log-probabilities are drawn by the program, all
    rows of the batch at once. The others are drawn on the host, from a float32 copy of their rows. Which
    of the two depends on a request's own parameters alone, so its tokens do not depend on its neighbours.

    Args:
        sample: the compiled `sample_program`, for logits as the forward program returns them.
    """

    def __init__(
        self,
        sample: Callable[[torch.Tensor, SampleInputs], torch.Tensor],
        device: str,
        vocabulary: Callable[[bool], VocabularyIndex],
        grammars: Grammars | None = None,
    ) -> None:
        host = Ops()
        super().__init__(sample, host, device, vocabulary, grammars)
        self._host = Sampler(host.sample, host, host.device, vocabulary, grammars)

    def _for_program(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def run(self, plan: StepPlan, logits: torch.Tensor, num_rows: int | None = None) -> StepResult:
        items = [item for item in plan.items if item.samples]
        count = sum([item.samples for item in items])
        states = [self._state(item.sequence) for item in items for _ in range(item.samples)]
        plain = [
            not state.changes_logits and state.logprobs is None and not state.beams
            for state in states
        ]
        tokens = np.full(count, -1, np.int64)
        if any(plain):
            by: list[Drawing] = [s if p else _NEUTRAL for s, p in zip(states, plain, strict=True)]
            sequences = [item.sequence for item in items for _ in range(item.samples)]
            inputs = self._sample_inputs(plan.lane, items, sequences, by, len(logits))
            tokens[:] = self._sample(logits, inputs).cpu().numpy()[:count]
        if all(plain) and not any(item.all_logits for item in plan.items):
            return StepResult(tokens)
        return self._on_host(plan, logits, tokens, plain)

    def _on_host(
        self, plan: StepPlan, logits: torch.Tensor, tokens: Int64, plain: list[bool]
    ) -> StepResult:
        """Completes `tokens` by those of rows that are not `plain`, and adds log-probabilities."""
        mine: list[ScheduledTokens] = []
        drawn: list[int] = []
        prompt: list[int] = []
        row, prompt_row = 0, len(tokens)
        for item in plan.items:
            end, prompt_end = row + item.samples, prompt_row + len(prompt_logprob_rows(item))
            if prompt_end > prompt_row or not all(plain[row:end]):
                mine.append(item)
                drawn.extend(range(row, end))
                prompt.extend(range(prompt_row, prompt_end))
            row, prompt_row = end, prompt_end
        host = logits.cpu()[drawn + prompt].float()
        found = self._host.run(StepPlan(plan.step, tuple(mine)), host)
        kept = [i for i, at in enumerate(drawn) if not plain[at]]
        tokens[[drawn[i] for i in kept]] = found.tokens[kept]
        logprobs: list[TokenLogprobs | None] = []
        if found.logprobs:
            logprobs = [None] * len(tokens)
            for i, entry in zip(drawn, found.logprobs, strict=True):
                logprobs[i] = entry
        candidates = {drawn[i]: each for i, each in found.candidates.items()}
        return StepResult(tokens, logprobs, found.prompt_logprobs, candidates)


def token_logprobs(
    logits: torch.Tensor, tokens: Int64, counts: Sequence[int], ops: Ops
) -> list[TokenLogprobs]:
    """Per row of raw logits [L, V] float32: the log-softmax of `tokens[i]`, its rank, and the
    `counts[i]` most likely tokens (-1: all of them)."""
    vocab = logits.shape[-1]
    chosen = index_at(tokens, logits).clamp_min(0)  # -1, a failed draw, has no log-probability
    logprobs, ranks, norm = ops.token_logprobs(logits, chosen)
    chosen_logprobs, chosen_ranks = logprobs.tolist(), ranks.tolist()
    widest = max(vocab if c < 0 else min(c, vocab) for c in counts)
    top_ids: list[list[int]] = [[] for _ in counts]
    top_values: list[list[float]] = [[] for _ in counts]
    if widest:
        values, ids = torch.topk(logits, widest, dim=-1)
        top_ids, top_values = ids.tolist(), (values - norm[:, None]).tolist()
    return [
        TokenLogprobs(
            int(token),
            chosen_logprobs[i],
            chosen_ranks[i],
            top_ids[i][: vocab if counts[i] < 0 else counts[i]],
            top_values[i][: vocab if counts[i] < 0 else counts[i]],
        )
        for i, token in enumerate(tokens.tolist())
    ]
