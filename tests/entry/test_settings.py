"""One configuration out of flags, environment, file and defaults, with every value's origin."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from octavo.core.config import ConfigError, EngineConfig, environment, wants_color
from octavo.core.entry.cli.main import main
from octavo.core.entry.cli.options import add_engine_options, add_server_options, settings_of
from octavo.core.entry.cli.settings import (
    ENGINE,
    SERVER,
    engine_values,
    read_file,
    resolve,
    server_values,
    shown,
)
from octavo.core.entry.server.run import ServerOptions

ALL = (*ENGINE, *SERVER)


def written(folder: Path, text: str, name: str = "octavo.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def parse(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    add_engine_options(parser)
    return settings_of(parser.parse_args(arguments), ALL)


def test_every_field_can_be_set_and_defaults_agree() -> None:
    values = resolve({}, ALL, environ={})
    assert engine_values(values) == EngineConfig()
    assert ServerOptions(**server_values(values)) == ServerOptions()
    fields = {field.name for field in dataclasses.fields(ServerOptions)}
    assert set(server_values(values)) == fields


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    path = written(tmp_path, "max-num-seqs: 3\nblock_size: 32\nthreads: 1\nport: 9000\n")
    environ = {"OCTAVO_MAX_NUM_SEQS": "5", "OCTAVO_BLOCK_SIZE": "64", "PATH": "x"}
    values = resolve({"max_num_seqs": 7}, ALL, config_file=path, environ=environ)
    got = {n: (values[n].value, values[n].origin) for n in ("max_num_seqs", "block_size")}
    assert got == {"max_num_seqs": (7, "--max-num-seqs"), "block_size": (64, "OCTAVO_BLOCK_SIZE")}
    assert (values["threads"].value, values["threads"].origin) == (1, path)
    assert values["port"].value == 9000 and values["seed"].origin == "default"
    again = resolve({}, ALL, environ={"OCTAVO_CONFIG": path})
    assert again["threads"].value == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "kv_memory: 2G\nenable_prefix_caching: no\nserved_model_name: [a, b]\n"),
        ("a.toml", 'kv-memory = "2G"\nenable-prefix-caching = false\nserved-model-name = ["a","b"]'),
        ("a.json", '{"kv_memory": "2G", "enable_prefix_caching": false,'
                   ' "served_model_name": ["a", "b"]}'),
    ],
)  # fmt: skip
def test_the_three_kinds_of_file(tmp_path: Path, name: str, text: str) -> None:
    values = resolve({}, ALL, config_file=written(tmp_path, text, name), environ={})
    assert values["kv_memory"].value == 2 << 30
    assert values["enable_prefix_caching"].value is False
    assert values["served_model_name"].value == ("a", "b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_seq: 3", "unknown key 'max_num_seq' .did you mean 'max_num_seqs'"),
        ("gpu_memory_utilization: 0.9", "not an option here: use kv_fraction"),
        ("max_num_seqs: [", "no valid YAML"),
        ("- a\n- b", "must hold keys and values"),
        ("max_num_seqs: many", "max_num_seqs must be a whole number, got 'many'"),
        ("max_num_seqs: true", "max_num_seqs must be a whole number, got True"),
        ("enable_prefix_caching: 1", "must be true or false"),
        ("kv_memory: lots", "not a size"),
        ("host: 5", "host must be text"),
        ("a-b: 1", "unknown key 'a-b'"),
        ("block-size: 16\nblock_size: 16", "block_size twice"),
        ("log_level: loud", "log_level must be one of debug"),
    ],
)
def test_a_files_mistakes(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve({}, ALL, config_file=written(tmp_path, text), environ={})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"must end in \.yaml"):
        read_file(Path(written(tmp_path, "a: 1", "a.ini")))
    with pytest.raises(ConfigError, match="no valid TOML"):
        read_file(Path(written(tmp_path, "a = ", "a.toml")))
    assert read_file(Path(written(tmp_path, "", "b.yaml"))) == {}
    assert read_file(Path(written(tmp_path, "threads:\n", "c.yaml"))) == {}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("OCTAVO_MAX_NUM_SEQ", "3", "did you mean 'OCTAVO_MAX_NUM_SEQS'"),
        ("OCTAVO_TENSOR_PARALLEL_SIZE", "2", "not an option here"),
        ("OCTAVO_ZZZZZZ", "2", "see octavo serve --help"),
        ("OCTAVO_MAX_NUM_SEQS", "x", "OCTAVO_MAX_NUM_SEQS must be a whole number, got 'x'"),
        ("OCTAVO_KV_MEMORY", "x", "OCTAVO_KV_MEMORY: 'x' is not a size"),
        ("OCTAVO_ENABLE_PREFIX_CACHING", "maybe", "must be true or false"),
    ],
)
def test_mistakes_in_the_environment(name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve({}, ALL, environ={name: text})


def test_what_the_environment_means() -> None:
    environ = {
        "OCTAVO_ENABLE_PREFIX_CACHING": "off",
        "OCTAVO_SERVED_MODEL_NAME": "a, b",
        "OCTAVO_KV_MEMORY": "1G",
        "OCTAVO_API_KEY": "",
        "OCTAVO_DEBUG": "1",
        # a Service named octavo, as Kubernetes describes it to every pod
        "OCTAVO_PORT": "tcp://10.0.0.1:80",
        "OCTAVO_SERVICE_HOST": "10.0.0.1",
        "OCTAVO_SERVICE_PORT_HTTP": "80",
        "OCTAVO_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    values = resolve({}, ALL, environ=environ)
    assert values["enable_prefix_caching"].value is False
    assert values["served_model_name"].value == ("a", "b")
    assert values["kv_memory"].value == 1 << 30
    assert values["api_key"].origin == values["port"].origin == "default"
    assert environment({"OCTAVO_X": "1", "X": "2"}) == {"x": "1"}


def test_a_value_that_cannot_be_used_names_its_origin(tmp_path: Path) -> None:
    path = written(tmp_path, "max_num_seqs: 0")
    with pytest.raises(ConfigError, match=r"max_num_seqs must be.*from .*octavo\.yaml"):
        engine_values(resolve({}, ALL, config_file=path, environ={}))


def test_what_is_shown_can_be_used_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "hush")
    monkeypatch.setenv("OCTAVO_THREADS", "2")
    main(["serve", "some/model", "--port", "81", "--kv-memory", "1G", "--show-config",
          "--served-model-name", "x", "--no-enable-prefix-caching"])  # fmt: skip
    text = capsys.readouterr().out
    assert "hush" not in text and "# OCTAVO_API_KEY" in text and "# MODEL" in text
    assert "# --port" in text and "# OCTAVO_THREADS" in text and "# default" in text
    values = resolve({}, ALL, config_file=written(tmp_path, text), environ={})
    assert values["kv_memory"].value == 1 << 30 and values["model"].value == "some/model"
    assert values["served_model_name"].value == ("x",) and values["threads"].value == 2
    assert values["enable_prefix_caching"].value is False
    assert shown(values).count("\n") == len(ALL) - 1


def test_show_config_of_another_command_has_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "--show-config"])
    text = capsys.readouterr().out
    assert "max_num_seqs: 64" in text and "port" not in text


def test_flags_become_settings(tmp_path: Path) -> None:
    path = written(tmp_path, "host: 0.0.0.0\n")
    values = parse("m", "--config", path, "--served-model-name", "a", "b", "--block-size", "32")
    assert values["host"].value == "0.0.0.0" and values["served_model_name"].value == ("a", "b")
    assert values["model"].origin == "MODEL" and values["block_size"].origin == "--block-size"


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--gpu-memory-utilization=0.9", "use kv_fraction"),
        ("--tensor-parallel-size=2", "leave it out"),
        ("--no-enable-chunked-prefill", "leave it out"),
        ("--tensor_parallel_size=2", "leave it out"),
    ],
)
def test_flags_known_from_elsewhere(
    flag: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", flag])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_mistakes_show_a_traceback_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--max-num-seqs", "0"])
    with pytest.raises(ConfigError):
        main(["serve", "--max-num-seqs", "0", "--debug"])
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    with pytest.raises(ConfigError):
        main(["serve", "--max-num-seqs", "0"])


def test_colour_is_left_out_when_asked() -> None:
    assert wants_color({}) and not wants_color({"NO_COLOR": "1"})
    assert not wants_color({"TERM": "dumb"})


def test_the_environment_is_read_in_one_module() -> None:
    from octavo.core.entry.cli import options, settings

    for module in (options, settings):
        assert "os.environ" not in inspect.getsource(module)
