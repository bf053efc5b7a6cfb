"""Settings that no engine could run with are refused by name, with what is allowed."""

import math
from typing import Any

import pytest

from quantpipe.engine.config import EngineConfig
from quantpipe.errors import RecipeError


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "policy",
            "shortes",
            "unknown 'shortes'; did you mean 'shortest'? (known: deadline, fcfs, priority, shortest)",
        ),
        ("batching", "continous", "unknown 'continous'; did you mean 'continuous'?"),
        ("admission", "peek", "unknown 'peek'; did you mean 'peak'?"),
        ("speculative", "ngramm", "unknown 'ngramm'; did you mean 'ngram'? (known: ngram, none)"),
        ("num_draft_tokens", 0, "0 is below 1"),
        ("max_prefill_chunk", 0, "0 is below 1"),
        ("max_long_prefills", 0, "0 is below 1"),
        ("long_prompt_tokens", 0, "0 is below 1"),
        ("target_step_s", 0.0, "0.0 is not a finite time above 0"),
        ("target_step_s", math.nan, "nan is not a finite time above 0"),
        ("static_wait_s", -1.0, "-1.0 is not a finite time of at least 0"),
        ("static_wait_s", math.inf, "inf is not a finite time of at least 0"),
        ("sink_tokens", -1, "-1 is below 0"),
        ("sink_tokens", 4, "4 sinks stand before a window; give engine.window_tokens too"),
        ("window_tokens", 15, "15 is below the block size 16; raise it, or lower engine.block_size"),
        ("max_num_seqs", 1000, "each running sequence needs one token per step"),
        ("block_size", 0, "0 is below 1"),
    ],
)
def test_impossible_setting_is_refused_by_name(setting: str, value: Any, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        EngineConfig(**{setting: value})
    assert str(caught.value).startswith("engine.") and setting in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_policy_mode_and_rule_is_accepted() -> None:
    for policy in ("fcfs", "priority", "shortest", "deadline"):
        for batching in ("continuous", "dynamic", "static"):
            for admission in ("peak", "reserve", "greedy"):
                EngineConfig(policy=policy, batching=batching, admission=admission)
