"""Every value that cannot be served is refused by the parameter's name, in one line."""

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

from quantpipe.engine.sampling_params import SamplingParams, check_params
from quantpipe.errors import RequestError

VOCAB = 31

BAD: dict[str, list[Any]] = {
    "max_tokens": [-1, 1.5, "1", True, None],
    "min_tokens": [-1, 17, 0.5, None, 10**30],
    "temperature": [-0.1, math.nan, math.inf, -math.inf, "hot", None, True, 10**400],
    "top_p": [0, -0.1, 1.1, math.nan, math.inf, None],
    "top_k": [-1, 2.5, math.nan, None],
    "min_p": [-0.01, 1.01, math.nan, math.inf, None],
    "repetition_penalty": [0, -1, math.nan, math.inf, None],
    "presence_penalty": [-2.01, 2.01, math.nan, math.inf, None, 10**400],
    "frequency_penalty": [-2.01, 2.01, math.nan, -math.inf, "1"],
    "logit_bias": [
        {31: 1.0},
        {-1: 1.0},
        {10**30: 1.0},
        {"5": 1.0},
        {1.0: 1.0},
        {True: 1.0},
        {5: math.nan},
        {5: -math.inf},
        {5: 100.5},
        {5: None},
        {3: 1.0, 5: -101},
        [1, 2],
        None,
    ],
    "stop_token_ids": [(31,), (-1,), (1, 10**30), (1.5,), ("a",), (None,)],
    "logprobs": [-1, 21, 1.5, True],
    "prompt_logprobs": [-1, 21, True, False],
    "seed": [1.5, "1", math.nan],
}


@pytest.mark.parametrize(("param", "value"), [(param, value) for param, values in BAD.items() for value in values])
def test_value_that_cannot_be_served_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_params(dataclasses.replace(SamplingParams(), **{param: value}), VOCAB)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"min_tokens": 16, "max_tokens": 16},
        {"max_tokens": 0},
        {"min_p": 1, "top_p": 1, "top_k": 10**9, "temperature": 1e300},
        {"repetition_penalty": 1e-3, "presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, 30: 100, np.int64(4): np.float32(0.5)}},
        {"stop_token_ids": (0, 30), "logprobs": 20, "prompt_logprobs": 0, "seed": -(2**70)},
    ],
)
def test_values_at_the_edges_are_served(changes: dict[str, Any]) -> None:
    check_params(SamplingParams(**changes), VOCAB)


def test_message_says_what_is_allowed() -> None:
    with pytest.raises(RequestError, match=r"^min_tokens: 20 exceeds max_tokens 16; lower it$"):
        check_params(SamplingParams(min_tokens=20), VOCAB)
    with pytest.raises(RequestError, match=r"^logit_bias: token id 40 is outside the vocabulary 0\.\.30$"):
        check_params(SamplingParams(logit_bias={40: 1.0}), VOCAB)
    with pytest.raises(RequestError, match=r"^frequency_penalty: 3 is outside \[-2, 2\]$"):
        check_params(SamplingParams(frequency_penalty=3), VOCAB)


def test_a_parameter_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(
        RequestError, match=r"^temprature: unknown sampling parameter; did you mean 'temperature'\?"
    ) as e:
        SamplingParams(**{"temprature": 1.0})
    assert e.value.param == "temprature"
    params = SamplingParams(4, temperature=1.0)
    for copied in (dataclasses.replace(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert copied == params
