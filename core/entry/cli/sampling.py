"""Sampling parameters as flags and as words typed into a chat, out of one table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.core.config import ConfigError, nearest

# name -> (kind, help). texts and ids may be given several times; bias is ID:BIAS.
SAMPLING: dict[str, tuple[str, str]] = {
    "max_tokens": ("int", "most tokens to generate"),
    "temperature": ("float", "0: the most likely token, always"),
    "top_p": ("float", "share of probability to draw from"),
    "top_k": ("int", "number of tokens to draw from; 0: all"),
    "min_p": ("float", "least probability, as a share of the most likely token's"),
    "repetition_penalty": ("float", "above 1: fewer repetitions"),
    "presence_penalty": ("float", "lowers tokens that have appeared"),
    "frequency_penalty": ("float", "lowers tokens by how often they have appeared"),
    "stop": ("texts", "end before this text"),
    "stop_token_ids": ("ids", "end at this token"),
    "include_stop_str_in_output": ("bool", "keep the stop text"),
    "ignore_eos": ("bool", "go on to max_tokens"),
    "min_tokens": ("int", "no end before as many tokens"),
    "bad_words": ("texts", "never write this"),
    "allowed_token_ids": ("ids", "draw from these tokens only"),
    "logit_bias": ("bias", "add BIAS to a token's logit"),
    "n": ("int", "answers to each prompt"),
    "logprobs": ("int", "log-probabilities of each token and of as many likely ones"),
    "prompt_logprobs": ("int", "the same for the prompt"),
    "skip_special_tokens": ("bool", "leave special tokens out of the text"),
    "structured_outputs": (
        "grammar",
        'what an answer has to be: {"json": SCHEMA}, {"regex": "…"}, {"choice": […]}, {"grammar": "…"} or '
        '{"json_object": true}, or @FILE that holds it',
    ),
    "best_of": ("int", "samples to draw, or beams, of which the best n are shown"),
    "use_beam_search": ("bool", "search for the most likely texts with best_of (or n) beams"),
    "length_penalty": ("float", "of beams: above 0 favours long texts, below 0 short ones"),
    "early_stopping": ("early", "of beams: true, false or never"),
    "truncate_prompt_tokens": ("int", "keep as many last tokens of a prompt; -1: what fits"),
}
CHAT = (*list(SAMPLING)[:13], "seed")
"""What makes sense in a chat."""

_METAVARS = {"int": "INT", "float": "FLOAT", "texts": "TEXT", "ids": "ID", "bias": "ID:BIAS"}
_METAVARS["grammar"] = "JSON"
_METAVARS["early"] = "WHEN"
_WORDS = {"true": True, "on": True, "yes": True, "1": True} | {
    "false": False, "off": False, "no": False, "0": False,
}  # fmt: skip


def add_sampling_options(
    parser: argparse.ArgumentParser, names: tuple[str, ...] = tuple(SAMPLING)
) -> None:
    """A flag for each parameter, absent from the result unless given. `--seed` is the engine's."""
    group = parser.add_argument_group("sampling")
    for name in names:
        if name == "seed":
            continue
        kind, text = SAMPLING[name]
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        if kind == "bool":
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _METAVARS[kind]
            options["type"] = _TYPES.get(kind, int)
        if kind in ("texts", "ids", "bias"):
            options["action"] = "append"
        group.add_argument("--" + name.replace("_", "-"), **options)


def _bias(text: str) -> tuple[int, float]:
    token, colon, bias = text.partition(":")
    try:
        if colon:
            return int(token), float(bias)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not ID:BIAS, as 42:-100")


def _grammar(text: str) -> Any:
    from octavo.core.params import ParamError, StructuredOutputsParams

    try:
        data = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
        if not isinstance(data, dict):
            raise ValueError(f"it is {data!r:.40}, not an object")
        return StructuredOutputsParams(**data)
    except (OSError, ValueError, ParamError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _early(text: str) -> bool | str:
    if text not in ("true", "false", "never"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true, false or never")
    return text if text == "never" else text == "true"


_TYPES: dict[str, Any] = {"early": _early} | {
    "float": float,
    "texts": str,
    "bias": _bias,
    "grammar": _grammar,
}


def sampling_values(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of `SamplingParams`."""
    values = {name: value for name, value in vars(options).items() if name in SAMPLING}
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    return values


def parse_typed(name: str, text: str) -> Any:
    """A parameter's value as typed; None for `default`, which takes it back.

    Raises:
        ConfigError, ParamError: no such parameter, or a value that it cannot have.
    """
    from octavo.core.params import SamplingParams

    name = name.replace("-", "_")
    if name not in CHAT:
        raise ConfigError(f"there is no {name!r} to set{nearest(name, CHAT)}: {', '.join(CHAT)}")
    if text == "default":
        return None
    kind = "int" if name == "seed" else SAMPLING[name][0]
    value: Any
    try:
        if kind == "bool":
            value = _WORDS[text.lower()]
        elif kind == "texts":
            value = [text.encode().decode("unicode_escape") if "\\" in text else text]
        elif kind == "ids":
            value = [int(part) for part in text.replace(",", " ").split()]
        else:
            value = float(text) if kind == "float" else int(text)
    except (KeyError, ValueError):
        wanted = {"bool": "on or off", "float": "a number", "ids": "token ids"}
        raise ConfigError(
            f"{name} must be {wanted.get(kind, 'a whole number')}, got {text!r}"
        ) from None
    SamplingParams(**{name: value})
    return value


def shown_values(values: Mapping[str, Any]) -> str:
    """Parameters in a line."""
    return ", ".join(f"{n} {v}" for n, v in values.items()) or "the model's own defaults"
