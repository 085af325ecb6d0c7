"""`LLM.beam_search`: vLLM's names for beam search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.core.params import SamplingParams
from octavo.core.types import LogprobsAt, RequestOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams:
    """How beams are searched. Names are vLLM's.

    temperature: beams are not drawn: other than 0 and 1 it is refused when it is used.
    early_stopping: True, False or "never", as in transformers.
    stop, stop_token_ids: what ends a beam beside the model's own end; min_tokens: not before so many.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0

    def sampling(self) -> SamplingParams:
        """The same as sampling parameters.

        Raises:
            ParamError: a value out of its range, or one that beams cannot have.
        """
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            min_tokens=self.min_tokens,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            logprobs=0,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam. `tokens`: the prompt's and its own; `text`: its own text; `cum_logprob`: the sum of its
    tokens' log-probabilities; `score`: what it was ranked by."""

    tokens: list[int]
    logprobs: list[LogprobsAt]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)

    @classmethod
    def of(cls, output: RequestOutput) -> BeamSearchOutput:
        """What a request with `use_beam_search` brought."""
        found: list[Any] = [
            BeamSearchSequence(
                tokens=[*output.prompt_token_ids, *sample.token_ids],
                logprobs=list(sample.logprobs or ()),
                cum_logprob=sample.cumulative_logprob or 0.0,
                text=sample.text,
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
                score=sample.score,
            )
            for sample in output.outputs
        ]
        return cls(found)
