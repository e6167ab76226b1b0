"""Bodies of requests: whatever JSON says, it is a call or one sentence that names what is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusible.cli.serving.calls import Call, chat_call, completion_call
from fusible.cli.serving.errors import ApiError
from fusible.models.generation import Sampling

NAMES = (
    "model prompt messages max_tokens max_completion_tokens temperature top_k top_p min_p repetition_penalty seed stop stream stream_options n echo "
    "best_of suffix logit_bias presence_penalty frequency_penalty logprobs top_logprobs tools tool_choice response_format user chat_template_kwargs x"
).split()
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3), max_leaves=8)
MESSAGE = st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=3) | JSON})
RIGHT = {"model": "tiny", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(("read", "other"), [(completion_call, "messages"), (chat_call, "prompt")])
def test_any_body_is_a_call_or_a_sentence(read: Any, other: str) -> None:
    outcomes = set()

    @given(
        fields=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4),
        base=st.sampled_from([{}, RIGHT]),
        messages=st.none() | st.lists(MESSAGE, max_size=2),
    )
    def check(fields: dict[str, Any], base: dict[str, Any], messages: list[Any] | None) -> None:
        body = {**base, **fields, **({"messages": messages} if messages is not None and other != "messages" else {})}
        body.pop(other, None)
        try:
            call = read(body, Sampling())
        except ApiError as error:
            outcomes.add(ApiError)
            assert error.status == 400 and error.param
            assert re.fullmatch(r"[^\n]+: expected [^\n]+, got [^\n]+; [^\n]+\.", error.message) and len(error.message) < 600
        else:
            outcomes.add(Call)
            assert isinstance(call, Call) and (call.prompts or call.messages)

    check()
    assert outcomes == {ApiError, Call}


def test_what_is_left_out_is_the_default() -> None:
    defaults = Sampling(0.7, 40, 0.9, 0.05, 1.1)
    assert completion_call({"model": "tiny", "prompt": "x"}, defaults).sampling == defaults
    given_all = {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "seed": -5}
    assert completion_call({"model": "tiny", "prompt": "x", **given_all}, defaults).sampling == Sampling(0, seed=-5)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat_call({"model": "tiny", "messages": [{"role": "user", "content": parts, "name": "n"}], "max_completion_tokens": 3}, defaults)
    assert call.messages == ({"role": "user", "content": "ab", "name": "n"},) and call.max_tokens == 3 and call.template == {}
