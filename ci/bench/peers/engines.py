"""Octavo's variants and its peers: how each is started, and which works it gets."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from octavo.core.config import ConfigError
from peers.environments import Environment, Environments
from peers.models import Models

ROOT = Path(__file__).parents[3]
_PACKAGE_PATH = str(Path(__file__).parents[1])
_ALL = ("sharegpt", "single", "prefill160", "prefill512", "uniform", "prefix", "startup")
_AT_ONCE, _BATCHED_TOKENS, _KV_GIB = 64, 512, 2
# Blocks of 256 tokens: the same memory for SmolLM2-135M (30 layers, 2 x 192 float32 values a token).
_PAGES = _KV_GIB * 2**30 // (256 * 30 * 2 * 192 * 4)
_LLAMA_KINDS = ("F32", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M")
_ONE_AT_A_TIME_REQUESTS = 16
_SOURCES = ("core", "backends", "plugins", "kernels", "pyproject.toml")
BASELINE = "transformers-one"
"""Whose tokens are the reference in float32, and the slowest that a reader knows."""
DEFAULT_VARIANTS = (
    "float32=--dtype float32",
    "int8=--quantization int8",
    "int4=--quantization int4",
)


@dataclass(frozen=True)
class Places:
    """What engines are made of. threads: cores this process may use."""

    environments: Environments
    models: Models
    threads: int


@dataclass(frozen=True)
class Prepared:
    """An engine that can be started: `command` and the job's file.

    environment: variables beside those of this process. options: go into the job.
    """

    command: tuple[str, ...]
    version: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """One row of the table.

    family: what `--only` also takes; "octavo" marks the variants that the others are compared with.
    first: work -> it gets only so many of the work's requests.
    prepare: installs and converts what is missing; raises PeerError.
    """

    name: str
    family: str
    about: str
    works: tuple[str, ...]
    prepare: Callable[[Places], Prepared]
    first: Mapping[str, int] = field(default_factory=dict)


def _adapter(
    name: str, found: Environment, options: dict[str, Any], **environment: str
) -> Prepared:
    command = (found.python, "-P", "-m", f"peers.adapters.{name}_engine")
    variables = {"PYTHONPATH": _PACKAGE_PATH, "HF_HUB_OFFLINE": "1", **environment}
    return Prepared(command, found.version, options, variables)


def octavo_version() -> str:
    """The package's version and the last commit of what it is built from, uncommitted changes too.

    A commit to documents or tests leaves what was measured valid.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("log", "-1", "--abbrev=12", "--format=%h", "--", *_SOURCES)
    changes = git("diff", "HEAD", "--", *_SOURCES)
    parts = [commit, hashlib.sha256(changes.encode()).hexdigest()[:8] if changes else ""]
    local = ".".join(part for part in parts if part)
    return version("octavo") + (f"+{local}" if local else "")


def octavo(variant: str, flags: Sequence[str]) -> Engine:
    """Octavo with engine flags as its commands take them."""

    def prepare(places: Places) -> Prepared:
        here = Environment(sys.executable, octavo_version(), Path(sys.prefix))
        options = {"model": str(places.models.safetensors()), "flags": list(flags)}
        return _adapter("octavo", here, options)

    return Engine(f"octavo-{variant}", "octavo", shlex.join(flags) or "defaults", _ALL, prepare)


def variant(text: str) -> Engine:
    """`name=flags` as an engine.

    Raises:
        ConfigError: it has another form.
    """
    name, equals, flags = text.partition("=")
    if not equals or not name.strip() or not all(c.isalnum() or c in "-_." for c in name):
        raise ConfigError(
            f"--octavo-variant {text!r}: write NAME=FLAGS, as 'int8=--quantization int8'; "
            "a name has letters, digits, '-', '_' and '.'"
        )
    return octavo(name, shlex.split(flags))


def octavo_codes() -> Engine:
    """Octavo on the model as it is given, not on what was made of it for all: in float32, with a GGUF's codes kept."""

    def prepare(places: Places) -> Prepared:
        here = Environment(sys.executable, octavo_version(), Path(sys.prefix))
        options = {"model": places.models.source, "flags": ["--dtype", "float32"]}
        return _adapter("octavo", here, options)

    about = "--dtype float32, by the model file's own codes: the same numbers"
    return Engine("octavo-codes", "octavo", about, _ALL, prepare)


def _transformers() -> list[Engine]:
    def engine(
        name: str,
        about: str,
        works: tuple[str, ...],
        options: dict[str, Any],
        first: Mapping[str, int] | None = None,
    ) -> Engine:
        def prepare(places: Places) -> Prepared:
            values = {"model": str(places.models.safetensors()), **options}
            return _adapter("transformers", places.environments.get("transformers"), values)

        return Engine(name, "transformers", about, works, prepare, first or {})

    one = ("sharegpt", "single", "prefill160", "prefill512", "startup")
    return [
        engine(
            BASELINE,
            f"generate(), one request at a time, float32; of sharegpt {_ONE_AT_A_TIME_REQUESTS}",
            one,
            {"mode": "one", "batch": 1},
            {"sharegpt": _ONE_AT_A_TIME_REQUESTS},
        ),
        engine(
            "transformers-static32",
            "generate(), batches of 32 padded at the left, float32",
            ("sharegpt", "uniform"),
            {"mode": "static", "batch": 32},
        ),
        engine(
            "transformers-continuous",
            "continuous batching, float32, 64 requests, 512 tokens a step",
            ("sharegpt", "uniform", "prefix", "startup"),
            {
                "mode": "continuous",
                "continuous": {
                    "max_batch_tokens": _BATCHED_TOKENS,
                    "max_requests_per_batch": _AT_ONCE,
                    "num_blocks": _PAGES,  # by itself it takes nine tenths of the free memory
                },
            },
        ),
    ]


def _vllm() -> Engine:
    def prepare(places: Places) -> Prepared:
        found = places.environments.get("vllm")
        options = {
            "model": str(places.models.safetensors()),
            "arguments": {"dtype": "float32", "max_num_seqs": _AT_ONCE, "max_model_len": 2048},
            "preload": list(found.preload),  # no argument, but part of what was measured
        }
        return _adapter(
            "vllm",
            found,
            options,
            # By itself it leaves one core unused.
            VLLM_CPU_OMP_THREADS_BIND=_cores(),
            VLLM_CPU_KVCACHE_SPACE=str(_KV_GIB),
            VLLM_NO_USAGE_STATS="1",
            LD_PRELOAD=":".join(found.preload),
        )

    about = "float32, every core bound, tcmalloc and Intel OpenMP preloaded where found"
    return Engine("vllm-cpu-f32", "vllm", about, _ALL, prepare)


def _cores() -> str:
    """The cores this process may use, as vLLM wants them listed."""
    if not hasattr(os, "sched_getaffinity"):
        return "auto"
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def _llamacpp(kind: str) -> Engine:
    def prepare(places: Places) -> Prepared:
        found = places.environments.get("llamacpp")
        options = {
            "model": str(places.models.gguf(kind)),
            "server": str(found.binaries / "llama-server"),
            "bench": str(found.binaries / "llama-batched-bench"),
            "slots": 32,
            "widths": [1, 8, 32],
            "arguments": [],
        }
        return _adapter("llamacpp", found, options)

    about = f"llama-server, {kind} weights, 32 slots, its defaults (float16 cache)"
    return Engine(f"llamacpp-{kind.lower()}", "llamacpp", about, (*_ALL, "batched"), prepare)


def _openvino(name: str, weights: str, about: str, properties: dict[str, str]) -> Engine:
    def prepare(places: Places) -> Prepared:
        options = {
            "model": str(places.models.openvino(weights)),
            "scheduler": {
                "max_num_batched_tokens": _BATCHED_TOKENS,
                "max_num_seqs": _AT_ONCE,
                "cache_size": _KV_GIB,
                "enable_prefix_caching": True,
            },
            "properties": properties,
        }
        return _adapter("openvino", places.environments.get("openvino"), options)

    return Engine(f"openvino-{name}", "openvino", about, _ALL, prepare)


def peers() -> list[Engine]:
    """Everything that Octavo is compared with."""
    float32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return [
        *_transformers(),
        _vllm(),
        *(_llamacpp(kind) for kind in _LLAMA_KINDS),
        _openvino("f32", "fp32", "continuous batching, float32 weights, sums and cache", float32),
        _openvino(
            "defaults",
            "fp32",
            "continuous batching, float32 weights; sums and cache as it chooses: bfloat16 where the "
            "CPU has it, an 8-bit cache",
            {},
        ),
        _openvino("int8", "int8", "continuous batching, int8 weights, its other defaults", {}),
    ]


def chosen(engines: Sequence[Engine], only: Sequence[str]) -> list[Engine]:
    """Those named, by their own name or their family's; all without a name.

    Raises:
        ConfigError: nothing has that name.
    """
    known = {e.name for e in engines} | {e.family for e in engines}
    if unknown := [name for name in only if name not in known]:
        names = ", ".join(e.name for e in engines)
        families = ", ".join(dict.fromkeys(e.family for e in engines))
        raise ConfigError(f"--only {unknown[0]}: there are {names}; or all of {families}")
    return [e for e in engines if not only or e.name in only or e.family in only]
