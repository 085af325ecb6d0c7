"""`LLM` around the null engine."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from null_engine import BOS, EOS, VOCAB, NullEngine, load

from octavo import LLM, SamplingParams
from octavo.core.config import ConfigError, EngineConfig
from octavo.core.entry.front import Front, load_front
from octavo.core.loading.errors import ModelConfigError
from octavo.core.params import ParamError, RequestRefused

SHORT = SamplingParams(max_tokens=6)


@pytest.fixture
def llm() -> LLM:
    return make()


def make(max_model_len: int = 256, **generation_config: Any) -> LLM:
    config = EngineConfig(max_model_len=max_model_len)
    front = Front("null", load(config).tokenizer, generation_config)
    return LLM.from_parts(config, front, NullEngine(config))


def test_outputs_stand_in_the_prompts_order(llm: LLM) -> None:
    prompts = [f"say:{'x' * n}" for n in (9, 1, 5)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=None))
    assert [o.outputs[0].text for o in outputs] == ["x" * 9, "x", "x" * 5]
    assert [o.prompt for o in outputs] == prompts
    assert all(o.finished and o.outputs[0].finish_reason == "stop" for o in outputs)


@pytest.mark.parametrize(
    "prompt", ["say:ok", {"prompt": "say:ok"}, [BOS, 118, 100, 124, 61, 114, 110]]
)
def test_forms_of_one_prompt(llm: LLM, prompt: Any) -> None:
    [output] = llm.generate(prompt, SHORT)
    assert output.outputs[0].text == "ok"
    assert output.prompt_token_ids == [BOS, 118, 100, 124, 61, 114, 110]
    [again] = llm.generate({"prompt_token_ids": output.prompt_token_ids}, SHORT)
    assert again.outputs[0].text == "ok" and again.prompt is None


@pytest.mark.parametrize(
    ("prompts", "word"),
    [
        ([[VOCAB]], f"0 to {VOCAB - 1}"),
        ([[-1]], "-1"),
        ([[True]], "True"),
        ([[1.5]], "1.5"),
        ([[]], "empty"),
        ({"promt": "x"}, "promt"),
        ({}, "needs"),
        (3, "int"),
        ([None], "NoneType"),
        (["\ud800"], "Unicode"),
        ([{"prompt": "x", "cache_salt": ""}], "cache_salt"),
    ],
)
def test_wrong_prompts_are_refused_before_anything_runs(llm: LLM, prompts: Any, word: str) -> None:
    with pytest.raises(ParamError, match=word):
        llm.generate(prompts, SHORT)
    assert not llm._engine.has_unfinished()


def test_one_bad_prompt_of_many_submits_none(llm: LLM) -> None:
    with pytest.raises(ParamError):
        llm.generate(["good", [VOCAB]], SHORT)
    assert llm._engine.stats().running == 0


def test_params_one_for_each(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=n) for n in (2, 4)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 4]
    with pytest.raises(ParamError, match="2 sampling_params for 1"):
        llm.generate("a", [SHORT, SHORT])
    for wrong in ({"max_tokens": 2}, [SHORT, None], "greedy"):
        with pytest.raises(ParamError, match=r"must be SamplingParams, got (dict|NoneType|str)"):
            llm.generate(["a", "b"], wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", [1, 104, 105, 106, 1000])
def test_length_is_what_was_asked_or_what_fits(llm: LLM, wanted: int) -> None:
    [output] = llm.generate([[40] * 151], SamplingParams(max_tokens=wanted))
    assert len(output.outputs[0].token_ids) == min(wanted, 256 - 151)
    assert output.outputs[0].finish_reason == "length"


def test_too_long_a_prompt_is_refused_with_the_numbers(llm: LLM) -> None:
    with pytest.raises(RequestRefused, match=r"256 tokens.*256"):
        llm.generate([[40] * 256], SHORT)
    for keep, left in ((10, 10), (-1, 250)):
        params = SamplingParams(max_tokens=6, truncate_prompt_tokens=keep)
        [output] = llm.generate([[40] * 200 + [41] * 100], params)
        assert output.prompt_token_ids == ([40] * 200 + [41] * 100)[-left:]
    with pytest.raises(ParamError, match="truncate_prompt_tokens"):
        llm.generate("x", SamplingParams(truncate_prompt_tokens=257))


def test_a_refused_request_leaves_the_engine_free(llm: LLM) -> None:
    with pytest.raises(RequestRefused, match="needs 9 KV blocks"):
        llm.generate(["one", "two", "refuse me", "three"], SHORT)
    assert not llm._engine.has_unfinished()
    assert llm.generate("say:fine", SHORT)[0].outputs[0].text == "fine"


def test_an_interrupt_aborts_everything(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm._engine.step, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50))
    assert not llm._engine.has_unfinished()
    assert llm.generate("say:on", SHORT)[0].outputs[0].text == "on"


def test_stream_yields_deltas_and_closing_aborts(llm: LLM) -> None:
    parts = [o.outputs[0].text for o in llm.stream("say:abc", SHORT)]
    assert parts == ["a", "b", "c", ""]
    stream = llm.stream("x", SamplingParams(max_tokens=100))
    next(stream)
    with pytest.raises(RuntimeError, match="still open"):
        llm.generate("y", SHORT)
    stream.close()
    assert not llm._engine.has_unfinished()
    assert llm.generate("say:on", SHORT)[0].outputs[0].text == "on"


def test_a_second_thread_is_told_and_the_first_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, met = llm._engine.add, threading.Barrier(2)

    def slow(request: Any) -> None:
        add(request)
        met.wait(10)  # the other thread has tried by then
        met.wait(10)

    monkeypatch.setattr(llm._engine, "add", slow)
    texts: list[str] = []
    first = threading.Thread(
        target=lambda: texts.append(llm.generate("say:one", SHORT)[0].outputs[0].text)
    )
    first.start()
    met.wait(10)
    with pytest.raises(RuntimeError, match="another thread uses it"):
        llm.generate("say:two", SHORT)
    met.wait(10)
    first.join(10)
    assert texts == ["one"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_told_rather_than_left_waiting(llm: LLM) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate("x", SHORT)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"make one in each child" in os.read(read, 1000)
    os.close(read)
    os.close(write)
    assert llm.generate("say:on", SHORT)[0].outputs[0].text == "on"


def test_stop_string_aborts_in_the_engine(llm: LLM) -> None:
    [output] = llm.generate("x", SamplingParams(max_tokens=None, stop="fox"))
    assert output.outputs[0].text == "The quick brown "
    assert not llm._engine.has_unfinished()


def test_chat_has_exactly_one_bos(llm: LLM) -> None:
    talk = [{"role": "user", "content": "say:yes"}]
    [output] = llm.chat(talk, SHORT)
    assert output.prompt_token_ids.count(BOS) == 1
    assert output.prompt is not None and output.prompt.startswith("<s>user: say:yes")
    assert output.outputs[0].text == "yes"
    both = llm.chat([talk, talk], SHORT)
    assert [o.outputs[0].text for o in both] == ["yes", "yes"]
    [continued] = llm.chat(
        [*talk, {"role": "assistant", "content": "ye"}],
        SHORT,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert continued.prompt is not None and continued.prompt.endswith("assistant: ye")


def test_text_that_brings_its_own_bos_is_reported(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    [output] = llm.generate("<s>hello", SHORT)
    assert output.prompt_token_ids[:2] == [BOS, BOS]
    assert "two BOS" in caplog.text


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([], {}),
        ("hello", {}),
        ([{"content": "x"}], {}),
        ([{"role": "user", "content": "x"}], {"continue_final_message": True}),
        ([{"role": "user", "content": "x"}], {"chat_template": "{{ nope("}),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"messages": []}}),
    ],
)
def test_wrong_conversations(llm: LLM, messages: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ParamError):
        llm.chat(messages, SHORT, **options)


def test_defaults_come_from_the_models_generation_config() -> None:
    llm = make(temperature=0.2, max_new_tokens=3, eos_token_id=5, do_sample=True)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.max_tokens, params.top_p) == (0.2, 3, 1.0)
    assert len(llm.generate("x")[0].outputs[0].token_ids) == 3
    assert make().get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_k": 50.5}, "top_k must be a whole number"),
        ({"repetition_penalty": -1}, "repetition_penalty must be"),
        ({"top_p": 1.5}, "top_p must be"),
    ],
)
def test_defaults_that_cannot_be_used_end_the_start(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Not every later request."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ModelConfigError, match=f"generation_config.json cannot be used: {words}"):
        load_front(EngineConfig(model=str(tmp_path), cache_dir=str(tmp_path)))


def test_logprobs_beyond_the_limit_are_refused(llm: LLM) -> None:
    for params in (SamplingParams(logprobs=21), SamplingParams(prompt_logprobs=-1)):
        with pytest.raises(ParamError, match="at most 20"):
            llm.generate("x", params)


@pytest.mark.parametrize(
    ("configured", "all_of_them"), [((), (EOS,)), ((7, 5), (7, 5, EOS)), ((EOS, 7), (EOS, 7))]
)
def test_the_tokenizers_eos_ends_too(
    configured: tuple[int, ...], all_of_them: tuple[int, ...]
) -> None:
    """Fine-tuned chat models often name their end of turn in the tokenizer's files alone."""
    config = EngineConfig(max_model_len=256)
    engine = NullEngine(config)
    engine.info = msgspec.structs.replace(engine.info, eos_token_ids=configured)
    seen: list[Any] = []
    add = engine.add
    engine.add = lambda request: (seen.append(request), add(request))[1]  # type: ignore[method-assign]
    made = LLM.from_parts(config, Front("null", load(config).tokenizer), engine)
    made.generate("say:x", SHORT)
    assert seen[0].eos_token_ids == all_of_them


def test_ignore_eos_and_eos(llm: LLM) -> None:
    [output] = llm.generate("say:hi", SHORT)
    assert list(output.outputs[0].token_ids)[-1] == EOS
    assert output.outputs[0].stop_reason is None


def test_priorities(llm: LLM) -> None:
    for priority in ([2**40], [True], [0, 0]):
        with pytest.raises(ParamError, match="priorit"):
            llm.generate(["x"], SHORT, priority=priority)
    assert len(llm.generate(["x"], SHORT, priority=[-5])) == 1


def test_shutdown_is_final_and_idempotent() -> None:
    with make() as llm:
        llm.generate("x", SHORT)
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate("x", SHORT)


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"max_model_length.*max_model_len"):
        LLM("m", max_model_length=5)
    with pytest.raises(ConfigError, match="kv_fraction"):
        LLM("m", gpu_memory_utilization=0.9)
