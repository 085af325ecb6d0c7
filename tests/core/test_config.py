"""The configuration: what is refused, and that the message helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.config import (
    _ELSEWHERE,
    ConfigError,
    EngineConfig,
    default_cache_dir,
    nearest,
    parse_bytes,
    prepare_thread_environment,
)


def test_defaults_are_valid_and_frozen() -> None:
    config = EngineConfig()
    assert config.device == "auto" and config.enable_prefix_caching
    with pytest.raises(AttributeError):
        config.device = "x"  # type: ignore[misc]
    assert config.with_values(max_num_seqs=3).max_num_seqs == 3


@pytest.mark.parametrize(
    ("given", "meant"),
    [("max_num_seq", "max_num_seqs"), ("blocksize", "block_size"), ("devise", "device")],
)
def test_unknown_option_names_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{given}'.*did you mean '{meant}'"):
        EngineConfig.from_kwargs(**{given: 1})


def test_unknown_option_without_kin_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"'zzz'; known: batch_invariant, block_size, .*threads"):
        EngineConfig.from_kwargs(zzz=1)


@pytest.mark.parametrize("name", sorted(_ELSEWHERE))
def test_options_known_from_elsewhere_say_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not an option here: .*(use|leave)"):
        EngineConfig.from_kwargs(**{name: 1})
    assert name not in EngineConfig.__dataclass_fields__


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            (name, value)
            for name in (
                "max_model_len",
                "max_num_seqs",
                "max_num_batched_tokens",
                "block_size",
                "num_kv_blocks",
                "kv_memory",
                "threads",
            )
            for value in (0, -1, 1.5, "8", True)
        ],
        ("num_kv_blocks", 1),
        ("dtype", "fp32"),
        ("kv_cache_dtype", "int4"),
        ("scheduling_policy", "lifo"),
        *[("kv_fraction", v) for v in (0, -0.1, 1.01, float("nan"), "0.5", True)],
        *[("max_logprobs", v) for v in (-2, 1.5, "5", True)],
        *[("seed", v) for v in (1.5, "0", None, True)],
        *[("enable_prefix_caching", v) for v in ("false", 0, None)],
        *[("swap_space", v) for v in (-1, "4", True, None, float("nan"), float("inf"))],
        ("preemption_mode", "copy"),
        *[("model", v) for v in ("", None, 3)],
        *[("device", v) for v in ("", None)],
    ],
)
def test_bounds(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_kwargs(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", 1), ("kv_fraction", 1.0), ("kv_fraction", 1), ("max_logprobs", -1),
     ("seed", -5), ("num_kv_blocks", 2)],
)  # fmt: skip
def test_the_edges_are_allowed(name: str, value: object) -> None:
    assert getattr(EngineConfig.from_kwargs(**{name: value}), name) == value


def test_a_near_dtype_is_named() -> None:
    with pytest.raises(ConfigError, match=r"got 'bfloat'.*did you mean 'bfloat16'"):
        EngineConfig(dtype="bfloat")


def test_two_sizes_of_the_cache_contradict() -> None:
    with pytest.raises(ConfigError, match="num_kv_blocks and kv_memory both size"):
        EngineConfig(num_kv_blocks=9, kv_memory=1 << 20)


def test_swapping_needs_somewhere_to_swap_to() -> None:
    with pytest.raises(
        ConfigError, match=r"preemption_mode swap needs host memory.*give swap_space"
    ):
        EngineConfig(preemption_mode="swap")
    useless = {"preemption_mode": "recompute", "enable_prefix_caching": False, "swap_space": 1}
    with pytest.raises(ConfigError, match=r"swap_space 1 has no use .*leave out one"):
        EngineConfig.from_kwargs(**useless)
    assert EngineConfig(swap_space=0.5, preemption_mode="swap").swap_space == 0.5


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512M", 512 << 20), ("2G", 2 << 30), ("2gib", 2 << 30), ("1.5k", 1536),
     (" 3 MB ", 3 << 20), ("1T", 1 << 40), ("10B", 10)],
)  # fmt: skip
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "0", "-1G", "x", "1X", "nan", "inf", "1e999", "2 G 3"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


def test_cache_dir_comes_from_option_then_environment(tmp_path: Path) -> None:
    assert EngineConfig(cache_dir=str(tmp_path)).cache_path() == tmp_path
    assert default_cache_dir({"OCTAVO_CACHE_DIR": str(tmp_path)}) == tmp_path
    assert default_cache_dir({}).name == "octavo"


def test_thread_environment_respects_the_user() -> None:
    environ = {"GOMP_SPINCOUNT": "7"}
    prepare_thread_environment(environ)
    assert environ["GOMP_SPINCOUNT"] == "7" and environ["KMP_BLOCKTIME"] == "0"
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    prepare_thread_environment(environ)
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"


def test_a_model_may_be_a_path(tmp_path: Path) -> None:
    assert EngineConfig.from_kwargs(model=tmp_path).model == str(tmp_path)


def test_nearest() -> None:
    assert nearest("cpuu", ["cpu", "cuda"]) == " (did you mean 'cpu'?)"
    assert nearest("qqqq", ["cpu", "cuda"]) == ""
