"""From the body a client sends to the parameters the engine gets."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from quantpipe.engine.sampling_params import SamplingParams, check_params
from quantpipe.serve.api import ChatCompletionRequest, CompletionRequest
from quantpipe.serve.fields import MAX_BIASED_TOKENS

VOCAB = 258


def params_of(**fields: Any) -> SamplingParams:
    """What both endpoints make of the same fields."""
    completion = CompletionRequest(model="m", prompt="p", **fields)
    chat = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "c"}], **fields}
    )
    params = completion.sampling_params(16, None)
    assert chat.sampling_params(16, None) == params
    return params


def test_what_is_left_out_or_null_asks_for_nothing_but_temperature_1() -> None:
    names = ["min_tokens", "min_p", "top_p", "top_k", "frequency_penalty", "presence_penalty", "repetition_penalty"]
    names += ["logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "temperature"]
    assert params_of() == params_of(**dict.fromkeys(names)) == SamplingParams(temperature=1.0)
    neutral = dict(min_tokens=0, min_p=0, top_k=-1, top_p=1, repetition_penalty=1, logit_bias={}, ignore_eos=False)
    assert params_of(**neutral, frequency_penalty=0, presence_penalty=0) == SamplingParams(temperature=1.0)


def test_every_field_reaches_the_engine_under_its_own_name() -> None:
    fields = dict(min_tokens=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.05, ignore_eos=True, seed=11)
    fields |= dict(repetition_penalty=1.1, presence_penalty=-2, frequency_penalty=2)
    params = params_of(**fields, logit_bias={"5": -100, "0": 7.5, "257": 100}, stop_token_ids=[4, 5])
    assert params == SamplingParams(
        **fields, max_tokens=16, logit_bias={5: -100.0, 0: 7.5, 257: 100.0}, stop_token_ids=(4, 5)
    )
    check_params(params, VOCAB)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"a": 1}, "must have token ids as keys, not 'a'"),
        ({"-1": 1}, "not '-1'"),
        ({"05": 1}, "not '05'"),
        ({" 5": 1}, "not ' 5'"),
        ({"5.0": 1}, "not '5.0'"),
        ({"٣": 1}, "token ids as keys"),
        ({"9" * 5000: 1}, "token ids as keys"),
        ({"5": 100.5}, "must be from -100 to 100 for token 5"),
        ({"5": float("nan")}, "must be from -100 to 100"),
        ({"5": float("-inf")}, "must be from -100 to 100"),
        ({"5": 10**400}, "must be from -100 to 100"),
        ({"5": "1"}, "must be from -100 to 100"),
        ({"5": True}, "must be from -100 to 100"),
        ({"5": None}, "must be from -100 to 100"),
        ({str(i): 1 for i in range(MAX_BIASED_TOKENS + 1)}, "at most 1,024 tokens"),
        ([["5", 1]], "valid dictionary"),
        ("5", "valid dictionary"),
    ],
    ids=lambda part: repr(part)[:20],
)
def test_logit_bias_of_another_shape_is_refused(bias: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest(model="m", prompt="p", logit_bias=bias)
    [error] = caught.value.errors()
    assert error["loc"] == ("logit_bias",)
    assert message in error["msg"] and len(error["msg"]) < 200


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([-1], "not -1"),
        ([True, False], "one kind only"),
        ([1, "a"], "one kind only"),
        (["a", None], "one kind only"),
        ([[1], [2, 3.5]], "not 3.5"),
        ([[1], ["b"]], 'not "b"'),
        ([[1], {}], "one kind only"),
        ([1, None], "one kind only"),
        (5, "must be a string, a list"),
        ([], "must not be empty"),
        ([[1], []], "must not be empty"),
    ],
    ids=repr,
)
def test_prompt_of_another_shape_is_refused_by_what_is_wrong_with_it(prompt: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest(model="m", prompt=prompt)
    [error] = caught.value.errors()
    assert error["loc"] == ("prompt",)
    assert message in error["msg"]


json_numbers = st.integers(-(10**30), 10**30) | st.floats() | st.booleans() | st.none() | st.text(max_size=3)


@given(
    st.sampled_from(["min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "top_k"]),
    json_numbers,
)
def test_what_the_api_lets_through_the_engine_can_serve_or_refuses_by_the_same_name(name: str, value: Any) -> None:
    try:
        params = params_of(**{name: value})
    except ValidationError as error:
        assert error.errors()[0]["loc"][0] == name
        return
    if params.min_tokens <= params.max_tokens:
        check_params(params, VOCAB)
