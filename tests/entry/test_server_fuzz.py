"""Whatever a client sends, it gets an answer of the right form, and the server lives."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.entry.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([-1, 0, 1, 2, 5, 258, 259, 2**31, 2**63])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["say:hi", "user", "text", "", "\0", "🙂"])
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "5"]), inner)
    ),
    max_leaves=6,
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]) | _VALUES, "content": _VALUES}
    ),
    max_size=3,
)


def _bodies(kind: type[msgspec.Struct], good: dict[str, Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from([*kind.__struct_fields__, "nonsense"])
    noise = st.dictionaries(names, _VALUES, max_size=2)
    messages = st.none() if "messages" not in good else st.none() | _MESSAGES
    return st.builds(
        lambda extra, talk: {**good, **({"messages": talk} if talk is not None else {}), **extra},
        noise,
        messages,
    )


_USER = [{"role": "user", "content": "say:hi"}]
_TARGETS = {
    "/v1/completions": (CompletionRequest, {"prompt": "say:hi", "max_tokens": 3}),
    "/v1/chat/completions": (ChatRequest, {"messages": _USER, "max_tokens": 3}),
    "/tokenize": (TokenizeRequest, {"messages": _USER}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1, 100]}),
}


@pytest.mark.parametrize("path", _TARGETS)
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_every_body_gets_an_answer(http: httpx.Client, path: str, data: Any) -> None:
    body = data.draw(_bodies(*_TARGETS[path]))
    if isinstance(body.get("n"), int):
        body["n"] = min(body["n"], 4)  # thousands of samples are slow, not wrong
    answer = http.post(path, content=msgspec.json.encode(body))
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n"), (body, answer.text)
