"""Chat templates: the same text as transformers, clear refusals, and a closed sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.loading import chat
from octavo.core.loading.errors import TemplateError
from octavo.core.loading.files import ModelFiles
from octavo.core.loading.tokenizer import load_tokenizer

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate "
    "user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant "
    "roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}
"""
QWEN = """{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.seen and message.role == "user" %}
        {%- set ns.seen = true %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if message.reasoning_content is defined %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
        {% generation %}{{- '<|im_start|>assistant\n' + content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}{% endgeneration %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- if documents %}{%- for d in documents %}{{- d.title }}{%- endfor %}{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "qwen": QWEN}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "été", "parameters": {"a": ["<x>", 1, None]}}}]
ONE = [{"role": "user", "content": " Hi & <bye>\n"}]
SEVERAL = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "two ", "tool_calls": None, "reasoning": "hm"},
    {"role": "user", "content": "3"},
    {"role": "assistant", "content": "fo"},
]


def _theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **NAMED)
    text: str = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, **options
    )
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": TOOLS, "documents": [{"title": "t", "text": "x"}]},
        {"add_generation_prompt": True, "enable_thinking": False},
    ],
)
def test_same_text_as_transformers(
    name: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    own = {k: v for k, v in options.items() if k != "enable_thinking"}
    variables = {**NAMED, **{k: v for k, v in options.items() if k == "enable_thinking"}}
    ours = chat.render(TEMPLATES[name], messages, **own, variables=variables)
    assert ours == _theirs(TEMPLATES[name], messages, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("end", ["fo", "fo ", "fo\n"])
def test_continuation_is_that_of_transformers(name: str, end: str) -> None:
    messages = [*SEVERAL[:-1], {"role": "assistant", "content": end}]
    ours = chat.render(
        TEMPLATES[name],
        messages,
        add_generation_prompt=False,
        continue_final_message=True,
        variables=NAMED,
    )
    assert ours == _theirs(TEMPLATES[name], messages, continue_final_message=True)
    assert ours.rstrip().endswith("fo")


@pytest.mark.parametrize("generation", [True, False])
def test_a_conversation_that_ends_in_tool_calls(generation: bool) -> None:
    call = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
    messages = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
    ]
    ours = chat.render(LLAMA3, messages, add_generation_prompt=generation, variables=NAMED)
    assert ours == _theirs(LLAMA3, messages, add_generation_prompt=generation)
    assert '"name": "weather"' in ours and "Zürich" in ours
    assert ours.endswith("assistant<|end_header_id|>\n\n") == generation


def test_smollm2_template(smollm2_files: ModelFiles) -> None:
    tokenizer = load_tokenizer(smollm2_files)
    assert isinstance(tokenizer.chat_template, str)
    for messages in (ONE, SEVERAL, [{"role": "system", "content": "s"}, *ONE]):
        ours = tokenizer.render_chat(messages)
        assert ours == _theirs(tokenizer.chat_template, messages, add_generation_prompt=True)
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert ids[0] == tokenizer.bos_token_id and ids.count(1) == 3
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(
        [{"role": "user", "content": "What is the capital of France?"}]
    )


def test_text_parts_are_joined_only_for_templates_that_take_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert "user\na\nb<|im_end|>" in chat.render(CHATML, messages)
    assert "user\nab<end_of_turn>" in chat.render(GEMMA, messages, variables=NAMED)
    assert [chat.handles_parts(t) for t in (CHATML, LLAMA3, MISTRAL, GEMMA, QWEN)] == [
        False,
        False,
        False,
        True,
        False,
    ]
    with pytest.raises(TemplateError, match="'image_url'"):
        chat.render(CHATML, [{"role": "user", "content": [{"type": "image_url"}]}])


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="at most one"):
        chat.render(CHATML, SEVERAL, continue_final_message=True)
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(ValueError, match="role 'assistant', but it has 'user'"):
        chat.render(CHATML, ONE, **options)
    with pytest.raises(ValueError, match="no text to continue"):
        chat.render(CHATML, [{"role": "assistant", "content": None}], **options)
    with pytest.raises(ValueError, match="empty"):
        chat.render(CHATML, [])
    with pytest.raises(ValueError, match="role"):
        chat.render(CHATML, [{"content": "x"}])
    with pytest.raises(TemplateError, match="cannot be continued"):
        chat.render("{{ messages[0].role }}", SEVERAL[1:2], **options)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for %}", "no valid jinja"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nope.deeper }}", "no attribute"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe|undefined"),
        ("{{ ('%s' % self)._TemplateReference__context.environment }}", "no attribute"),
        ("{{ 'x' * 1000000000 }}", "unreasonably"),
        ("{{ 1000000000 * [0] }}", "unreasonably"),
        ("{{ 10 ** 100000000 }}", "power"),
        ("{{ '%999999999d' % 1 }}", "width"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "characters"),
        ("{{ range(999999999) | list }}", "range"),
    ],
)
def test_bad_and_hostile_templates_are_template_errors(template: str, says: str) -> None:
    with pytest.raises(TemplateError, match=f"(?i){says}"):
        chat.render(template, ONE)


def test_templates_see_only_plain_data() -> None:
    with pytest.raises(ValueError, match="only JSON data, not"):
        chat.render(CHATML, [{"role": "user", "content": object()}])
    messages = [{"role": "user", "content": "x"}]
    chat.render("{% set m = messages[0] %}{{ m.content }}", messages)
    assert messages == [{"role": "user", "content": "x"}]
