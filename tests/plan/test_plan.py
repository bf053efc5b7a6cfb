"""The whole plan: what is recommended, and that people and programs are told the same."""

import json
from pathlib import Path

import pytest
from planned import GEMMA3_4B, H100, LLAMA2_70B, LLAMA_8B, MIXTRAL, write_config

from quantpipe.errors import RecipeError
from quantpipe.plan.memory import Load
from quantpipe.plan.plan import Plan, make_plan
from quantpipe.plan.record import as_json
from quantpipe.plan.slo import Slo
from quantpipe.plan.subject import changed, read_subject
from quantpipe.plan.text import render


def plan_of(
    folder: Path, config: dict[str, object], load: Load, slo: Slo | None = None, scheme: str | None = None
) -> Plan:
    subject = read_subject(write_config(folder, config), (), None, folder)
    return make_plan(changed(subject, scheme, None), H100, load, slo or Slo())


def test_as_many_sequences_are_recommended_as_fit(tmp_path: Path) -> None:
    made = plan_of(tmp_path, LLAMA_8B, Load(8, 32768))
    assert made.recommendation.max_num_seqs == made.memory.num_fitting < 256
    assert made.recommendation.gpu_memory_utilization_frac == 0.85
    assert made.recommendation.max_model_len == 32768


def test_an_slo_limits_the_batch(tmp_path: Path) -> None:
    free = plan_of(tmp_path, LLAMA_8B, Load(8, 1024))
    bound = plan_of(tmp_path, LLAMA_8B, Load(8, 1024), Slo(tpot_ms=10))
    assert 1 <= bound.recommendation.max_num_seqs < free.recommendation.max_num_seqs
    assert False in {row.meets_slo for row in bound.fits}
    assert "as fast as asked" in render(bound) and "as fast as asked" not in render(free)
    impossible = plan_of(tmp_path, LLAMA_8B, Load(8, 1024), Slo(tpot_ms=0.1))
    assert impossible.recommendation.max_num_seqs == 0
    assert "not even one at a time" in impossible.recommendation.reason


def test_what_does_not_fit_is_said_and_recommends_nothing(tmp_path: Path) -> None:
    made = plan_of(tmp_path, LLAMA2_70B, Load(8, 4096))
    assert made.recommendation.max_num_seqs == 0
    assert "IT DOES NOT FIT" in render(made)
    small = plan_of(tmp_path, LLAMA2_70B, Load(8, 4096), scheme="w4a16 g128")
    assert small.recommendation.max_num_seqs > 8 and "IT DOES NOT FIT" not in render(small)


def test_schemes_whose_groups_do_not_divide_are_left_out(tmp_path: Path) -> None:
    odd = plan_of(tmp_path, LLAMA_8B | {"intermediate_size": 14400}, Load(1, 512))
    assert [row.scheme for row in odd.schemes] == ["bf16", "w8a8", "w4a16 g64", "w3a16 g64"]


def test_a_context_beyond_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--context: 9,000 exceeds the model's own limit of 4,096 tokens"):
        plan_of(tmp_path, LLAMA2_70B, Load(8, 9000))


@pytest.mark.parametrize("config", [LLAMA_8B, GEMMA3_4B, MIXTRAL], ids=lambda config: str(config["model_type"]))
def test_every_plan_is_text_and_data(tmp_path: Path, config: dict[str, object]) -> None:
    made = plan_of(tmp_path, config, Load(8, 2048))
    text, data = render(made), json.loads(json.dumps(as_json(made)))
    for part in ("memory", "weights by scheme", "what fits", "what pays most", "to start with"):
        assert part in text
    assert all(len(line) < 200 for line in text.splitlines())
    assert data["memory"]["weight_bytes"] == made.memory.weight_bytes
    assert data["model"]["num_layers"] == len(made.shape.attention)
    assert [own["name"] for own in data["levers"]] == [lever.name for lever in made.levers]


def test_names_of_figures_end_in_their_units(tmp_path: Path) -> None:
    units = ("_bytes", "_s", "_frac", "_ratio", "_ms", "_tokens", "_token", "_sequence", "_per_s", "_per_byte")
    counts = {"concurrency", "head_dim", "max_position_embeddings", "max_model_len", "max_num_seqs"}

    def check(data: object) -> None:
        for value in data if isinstance(data, list) else []:
            check(value)
        for name, value in data.items() if isinstance(data, dict) else []:
            check(value)
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert name.endswith(units) or name.startswith("num_") or name in counts, name

    check(as_json(plan_of(tmp_path, LLAMA_8B, Load(8, 2048), Slo(500, 50))))
