"""Rendering chat templates: messages -> the text a model was trained on.

Templates come with models and are not trusted: they run in jinja's immutable sandbox, see nothing
but plain data, and may write only so much. The environment is the one transformers gives them, so
that its ``apply_chat_template`` renders the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from octavo.core.loading.errors import TemplateError

if TYPE_CHECKING:
    import jinja2

MAX_RENDERED_CHARS = 16 << 20
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# A message's reasoning goes by these names; templates read one or another.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTENT_IS_NONE = re.compile(r"content\b['\"\])]*\s+is\s+(not\s+)?none")
_WIDTH = re.compile(r"%[-+ #0]*(\d+|\*)|%.*\.(\d{5,}|\*)", re.DOTALL)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as text.

    messages: dicts with "role" and "content" (text, or a list of parts; text parts are joined by
    line breaks when the template handles only text). variables: further names the template may
    use; the tokenizer's special tokens go here.

    Raises ValueError for flags that contradict each other or the messages, TemplateError when the
    template refuses the conversation, fails or writes more than MAX_RENDERED_CHARS.
    """
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "add_generation_prompt begins a new answer and continue_final_message continues the "
            "last one: set at most one of them."
        )
    if not messages:
        raise ValueError("messages is empty: give at least one message")
    chat = [_message(message) for message in messages]
    if continue_final_message and chat[-1].get("tool_calls"):
        raise ValueError(
            "continue_final_message is set, but the last message ends in tool_calls: it is complete"
        )
    for message in chat:
        _shape_calls(message, template)
    if not handles_parts(template):
        for message in chat:
            if "content" in message:
                message["content"] = _flat(message["content"])
    final = _tag_final(chat) if continue_final_message else None
    text = _run(
        template,
        {
            **_plain(variables or {}, "template variables"),
            "messages": chat,
            "tools": _plain(tools, "tools"),
            "documents": _plain(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        },
    )
    return text if final is None else _cut_after_final(text, final)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = _plain(message, "messages")
    role = plain.get("role") if isinstance(plain, dict) else None
    if type(role) is not str:
        raise ValueError(f"each message is an object with a role; got {message!r}")
    # Clients send null for what is absent; templates would print it.
    plain = {key: value for key, value in plain.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _shape_calls(message: dict[str, Any], template: str) -> None:
    """Brings a message's calls into the shape that the template reads: most take arguments as data,
    some print the text."""
    calls = message.get("tool_calls")
    if not calls:
        return
    if "content" not in message:
        message["content"] = None if _CONTENT_IS_NONE.search(template) else ""
    as_text = wants_argument_text(template)
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not as_text:
            try:
                function["arguments"] = json.loads(arguments or "{}")
            except ValueError:
                raise ValueError(f"arguments of a call are no JSON: {arguments!r:.80}") from None
        elif isinstance(arguments, dict) and as_text:
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)


def _plain(value: Any, where: str) -> Any:
    """A copy of plain JSON data: templates must not reach objects with methods of their own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    raise ValueError(f"{where} may hold only JSON data, not {type(value).__name__}")


def _flat(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") == "text":
            texts.append(str(part.get("text", "")))
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise TemplateError(
                f"this model's chat template takes only text, not content parts of type {kind!r}"
            )
    return "\n".join(texts)


def _tag_final(chat: list[dict[str, Any]]) -> str:
    """Mark the end of the last message; returns the text it had."""
    last = chat[-1]
    if last["role"] != "assistant":
        raise ValueError(
            "continue_final_message needs the last message to have the role 'assistant', but it has "
            f"{last['role']!r}. Add the beginning of the answer as an assistant message."
        )
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_TAG
        return content
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _CONTINUE_TAG
            return text
    raise ValueError("continue_final_message is set, but the last message has no text to continue")


def _cut_after_final(text: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    at = text.rfind(tag)
    if at < 0 or final.strip() not in text:
        raise TemplateError(
            "this model's chat template drops or changes the last message, so it cannot be "
            "continued. Unset continue_final_message."
        )
    # A template that trims messages has trimmed the tag's own space, and so the message's.
    kept = text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG
    return text[:at] if kept else text[:at].rstrip()


def _run(template: str, variables: dict[str, Any]) -> str:
    import jinja2

    compiled = _compiled(template)
    pieces: list[str] = []
    size = 0
    try:
        for piece in compiled.generate(**variables):
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise TemplateError(
                    f"the chat template writes more than {MAX_RENDERED_CHARS} characters for this "
                    "conversation: shorten it, or check the template"
                )
            pieces.append(piece)
    except TemplateError:
        raise
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template refuses this conversation: {error}") from error
    except Exception as error:  # the template's own mistakes come as any exception
        raise TemplateError(
            f"the chat template fails on this conversation: {type(error).__name__}: {error}"
        ) from error
    return "".join(pieces)


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(template)
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template is no valid jinja template: {error}") from error


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks what an assistant wrote, for training; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012  jinja reads a plain set

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_unchanged")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _unchanged(self, caller: Any) -> Any:
            return caller()

    class Environment(ImmutableSandboxedEnvironment):
        # These operators can make a small template fill the memory before anything is written.
        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_size(operator, left, right)
            return super().call_binop(context, operator, left, right)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja's own filter escapes HTML, which models never saw
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _check_size(operator: str, left: Any, right: Any) -> None:
    if operator == "%":
        wide = isinstance(left, str) and _WIDTH.search(left)
        if wide and any(w == "*" or len(w or "") > 4 for w in wide.groups()):
            raise TemplateError("the chat template formats with an unreasonable width")
        return
    if operator == "**":
        if isinstance(right, int | float) and abs(right) > 64:
            raise TemplateError("the chat template raises to an unreasonable power")
        return
    for sequence, times in ((left, right), (right, left)):
        is_sequence = isinstance(sequence, str | list | tuple)
        if is_sequence and isinstance(times, int) and len(sequence) * times > MAX_RENDERED_CHARS:
            raise TemplateError("the chat template repeats a value unreasonably often")


@lru_cache(maxsize=32)
def handles_parts(template: str) -> bool:
    """Whether a template loops over a message's content, so that it takes lists of parts."""
    from jinja2 import nodes

    tree = _parsed(template)
    aliases = {"content"}  # also what macros call it
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, set()):
            aliases.add(assign.target.name)
    return any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))


def _is_content(node: Any, aliases: set[str]) -> bool:
    from jinja2 import nodes

    while isinstance(node, nodes.Filter):
        node = node.node
    return _is_named(node, "content", aliases)


@lru_cache(maxsize=32)
def takes_tools(template: str) -> bool:
    """Whether a template reads `tools`."""
    from jinja2 import meta

    return "tools" in meta.find_undeclared_variables(_parsed(template))


@lru_cache(maxsize=32)
def renders_calls(template: str) -> bool:
    """Whether a template reads the calls of earlier messages."""
    return "tool_calls" in template


@lru_cache(maxsize=32)
def wants_argument_text(template: str) -> bool:
    """Whether a template prints a call's arguments as they are, so that they have to be text."""
    from jinja2 import nodes

    tree = _parsed(template)
    aliases = {"arguments"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_named(assign.node, "arguments", set()):
            aliases.add(assign.target.name)
    printed: list[nodes.Node] = []
    for node in tree.find_all((nodes.Output, nodes.Concat)):
        printed += node.nodes
    for node in tree.find_all(nodes.Add):
        printed += [node.left, node.right]
    return any(_is_named(node, "arguments", aliases) for node in printed)


def _parsed(template: str) -> Any:
    import jinja2

    try:
        return _environment().parse(template)
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template is no valid jinja template: {error}") from error


def _is_named(node: Any, name: str, aliases: set[str]) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr == name
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == name
    return isinstance(node, nodes.Name) and node.name in aliases
