from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from architectures import ARCHITECTURES, MIXTURES, MakeModel, random_model
from torch import Tensor, nn

from quantpipe.errors import DataError
from quantpipe.formats.scheme import WeightScheme, w4a16, weight_only
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.solvers.scales import round_weight
from quantpipe.quantize.targets.allocate import Budget, LinearSet, allocate
from quantpipe.quantize.targets.discover import check_schemes, find_targets
from quantpipe.quantize.targets.sensitivity import measure_sensitivity, sample_tokens
from quantpipe.report import no_progress

LOW = w4a16(32)
TOKEN_IDS = np.random.default_rng(0).integers(3, 128, (3, 16))


def measure(
    folder: Path, work_folder: Path, schemes: dict[str, WeightScheme] | None = None
) -> tuple[StreamedModel, list[LinearSet]]:
    model = StreamedModel.open(folder)
    if schemes is None:
        schemes = dict(find_targets(model.module, model.blocks, head_of(model.module), LOW).schemes)
    return model, measure_sensitivity(model, schemes, TOKEN_IDS, work_folder, no_progress)


def head_of(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if name in ("lm_head", "embed_out") and child is not None]


def log_probabilities(model: nn.Module, token_ids: npt.NDArray[np.int64] = TOKEN_IDS) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.from_numpy(token_ids), use_cache=False).logits
    return logits.double().log_softmax(-1)


def mean_squares(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """What plain hooks see each linear read: the mean square of every input."""
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, args: seen.update({name: args[0].square().flatten(0, -2).mean(0)})

    hooks = [model.get_submodule(name).register_forward_pre_hook(note(name)) for name in names]
    log_probabilities(model)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
def test_each_set_costs_what_the_whole_model_loses_with_only_that_set_rounded(
    name: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    _, sets = measure(tiny_model(name), tmp_path)
    model = random_model(name)
    expected = log_probabilities(model)
    importance = mean_squares(model, [linear for part in sets for linear in part.shapes])
    for part in sets:
        kept = {}
        for linear in part.shapes:
            parameter = model.get_parameter(f"{linear}.weight")
            kept[linear] = parameter.detach().clone()
            solution = round_weight(kept[linear], LOW, torch.float32, importance[linear])
            parameter.data.copy_(solution.dequantized())
        found = log_probabilities(model)
        for linear, weight in kept.items():
            model.get_parameter(f"{linear}.weight").data.copy_(weight)
        kl = float((expected.exp() * (expected - found)).sum(-1).mean())
        # float32 against float64 sums
        assert part.kl == pytest.approx(kl, rel=1e-2, abs=1e-7), list(part.shapes)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_linear_of_every_architecture_is_in_one_set_that_may_be_upgraded(
    name: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    model = StreamedModel.open(tiny_model(name))
    targets = find_targets(model.module, model.blocks, head_of(model.module), LOW)
    sets = measure_sensitivity(model, targets.schemes, TOKEN_IDS, tmp_path, no_progress)
    assert sorted(linear for part in sets for linear in part.shapes) == sorted(targets.schemes)
    assert all(part.kl > 0 for part in sets)
    for index in range(len(sets)):
        alone = allocate(sets[index : index + 1], weight_only(8, None), Budget(average_bits=8.0))
        # readers that fuse linears, or load experts by one scheme, agree with these sets
        check_schemes(model.module, targets.schemes | alone.schemes, targets.ignored)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_all_layers_are_one_set(name: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    _, sets = measure(tiny_model(name), tmp_path)
    (experts,) = [part for part in sets if any(".experts." in linear for linear in part.shapes)]
    assert all(".experts." in linear for linear in experts.shapes)
    assert len(experts.shapes) == 2 * 4 * 3


def test_fused_linears_are_one_set_in_model_order(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    _, sets = measure(random_llama(), tmp_path)
    leaves = [[linear.rpartition(".")[2] for linear in part.shapes] for part in sets]
    assert leaves == 2 * [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert sets[0].shapes["model.layers.0.self_attn.k_proj"] == (32, 64)


def test_scales_are_those_of_the_stored_dtype(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    _, sets = measure(random_llama(torch.bfloat16), tmp_path)
    assert {part.scale_dtype for part in sets} == {torch.bfloat16}


def test_a_tied_head_is_a_set_of_its_own_and_the_embedding_stays(
    random_llama: Callable[..., Path], tmp_path: Path
) -> None:
    folder = random_llama(torch.bfloat16)
    model, sets = measure(folder, tmp_path, {"lm_head": LOW, "model.layers.1.mlp.down_proj": LOW})
    assert [list(part.shapes) for part in sets] == [["model.layers.1.mlp.down_proj"], ["lm_head"]]
    assert sets[1].scale_dtype == torch.bfloat16
    assert sets[1].kl > 0
    head, embedding = (model.module.get_parameter(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    assert head is embedding


def test_fewer_bits_cost_more(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.{leaf}" for layer in range(2) for leaf in ("self_attn.o_proj", "mlp.down_proj")]
    three, eight = (
        measure(random_llama(), tmp_path, dict.fromkeys(names, weight_only(bits, 32)))[1] for bits in (3, 8)
    )
    assert all(low.kl > 20 * high.kl for low, high in zip(three, eight, strict=True))


class CountingModel(StreamedModel):
    """Counts how often each block is read."""

    loads: list[int] = []  # noqa: RUF012 - one test

    def load_block(self, index: int) -> nn.Module:
        self.loads.append(index)
        return super().load_block(index)


def test_each_block_is_read_once_and_no_file_is_left(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    model = CountingModel.open(random_llama(num_hidden_layers=4))
    targets = find_targets(model.module, model.blocks, ["lm_head"], LOW)
    CountingModel.loads.clear()
    measure_sensitivity(model, targets.schemes, TOKEN_IDS, tmp_path, no_progress)
    assert CountingModel.loads == [0, 1, 2, 3]
    assert list(tmp_path.iterdir()) == []


def test_two_measurements_are_equal_and_leave_the_random_state(
    random_llama: Callable[..., Path], tmp_path: Path
) -> None:
    folder, state = random_llama(), torch.get_rng_state()
    first, second = (measure(folder, tmp_path)[1] for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)


def test_linears_that_share_a_tensor_in_two_schemes_are_refused(
    random_llama: Callable[..., Path], tmp_path: Path
) -> None:
    query, key = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")
    with pytest.raises(DataError, match=r"q_proj \(w4a16 g32.*k_proj \(w8a16 g32.*must share a scheme"):
        measure(random_llama(), tmp_path, {query: LOW, key: weight_only(8, 32)})


def test_sampled_tokens_are_spread_over_the_set() -> None:
    token_ids = np.arange(64 * 512).reshape(64, 512)
    sample = sample_tokens(token_ids, 512)
    assert sample.shape == (4, 128)
    assert [int(row[0]) // 512 for row in sample] == [0, 21, 42, 63]
    assert sample_tokens(token_ids, 64).shape == (1, 64)
    assert sample_tokens(token_ids[:2], 4096).shape == (2, 128)


def test_bits_spent_by_sensitivity_save_more_than_the_same_bits_spent_the_other_way(
    tiny_llama: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = Path(np.__file__).read_text(encoding="utf-8")
    ids = np.array(AutoTokenizer.from_pretrained(tiny_llama)(text).input_ids, dtype=np.int64)
    calibration, held_out = ids[: 4 * 128].reshape(4, 128), ids[-4 * 128 :].reshape(4, 128)
    model = StreamedModel.open(tiny_llama)
    low, high = weight_only(3, 64), weight_only(8, None)
    targets = find_targets(model.module, model.blocks, ["lm_head"], low)
    sets = measure_sensitivity(model, targets.schemes, calibration, tmp_path, no_progress)
    reversed_sets = [LinearSet(p.shapes, p.scheme, p.scale_dtype, 1 / p.kl) for p in sets]
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    expected = log_probabilities(base, held_out)
    weights = {name: base.get_parameter(f"{name}.weight").detach().clone() for name in targets.schemes}
    found = []
    for measured in (sets, reversed_sets):
        for name, scheme in allocate(measured, high, Budget(average_bits=4.5)).schemes.items():
            rounded_NK = round_weight(weights[name], scheme, torch.bfloat16).dequantized()
            base.get_parameter(f"{name}.weight").data.copy_(rounded_NK)
        quantized = log_probabilities(base, held_out)
        found.append(float((expected.exp() * (expected - quantized)).sum(-1).mean()))
    assert found[0] < 0.8 * found[1]


def test_documents_packed_apart_cost_what_each_costs_alone(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = StreamedModel.open(tiny_model("llama"))
    schemes = find_targets(model.module, model.blocks, ["lm_head"], LOW).schemes
    documents = np.random.default_rng(0).integers(3, 128, (6, 16))
    positions = np.tile(np.arange(16), (3, 2))
    packed = measure_sensitivity(model, schemes, documents.reshape(3, 32), tmp_path, no_progress, positions)
    alone = measure_sensitivity(model, schemes, documents, tmp_path, no_progress)
    crossing = measure_sensitivity(model, schemes, documents.reshape(3, 32), tmp_path, no_progress)
    assert [part.kl for part in packed] == pytest.approx([part.kl for part in alone], rel=1e-3)
    assert [part.kl for part in packed] != pytest.approx([part.kl for part in crossing], rel=1e-3)
