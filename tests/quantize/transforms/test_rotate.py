import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, HIDDEN, MakeModel, save_model
from torch import Tensor, nn

from quantpipe.errors import RecipeError
from quantpipe.quantize import TRANSFORMS
from quantpipe.quantize.loop.outside import outside_changes
from quantpipe.quantize.model.block_runs import Batch
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.transforms.hadamard import RotationKind, make_rotation
from quantpipe.quantize.transforms.rotate import Rotations, make_rotate, rotated
from quantpipe.quantize.transforms.transform import Transform, TransformInput, TransformRecord

# Norms of these families compute in float32 whatever they are given; what lies outside the blocks is float32 too.
EXACT = 1e-5
TOKEN_IDS = (torch.arange(80) * 7 % 128).reshape(2, 40)
# Channels are scaled by a norm between what writes the stream and the stream.
REFUSED = ("gemma3",)
ROTATED = tuple(name for name in ARCHITECTURES if name not in REFUSED)


@dataclass(frozen=True)
class Settings:
    kind: RotationKind = "hadamard"
    seed: int = 0


@dataclass
class Run:
    """Logits of a whole run in float64, its blocks, and what was recorded of them."""

    logits: Tensor
    blocks: list[nn.Module]
    records: list[TransformRecord]


@torch.no_grad()
def run(model: StreamedModel, transform: Transform | None) -> Run:
    """Run ``model`` in float64, each block rewritten by ``transform`` as it comes."""
    model.module.double()
    done = Run(torch.empty(0), [], [])

    def forward(index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        original = model.load_block(index)
        block = copy.deepcopy(original).double()
        if transform is not None:
            linears = {name: part for name, part in block.named_modules() if isinstance(part, nn.Linear)}
            done.records += transform(TransformInput(block, original, linears, [], {}, model.blocks.name(index)))
        done.blocks.append(block)
        return block(hidden, *args, **kwargs)

    with model.replaced([partial(forward, index) for index in range(len(model.blocks.blocks))]):
        done.logits = model.module(input_ids=TOKEN_IDS, use_cache=False).logits
    model.module.float()
    return done


def rotate(folder: Path, settings: Settings = Settings()) -> tuple[float, Run, StreamedModel]:
    """The relative change of the logits when the model of ``folder`` is rotated, the rotated run, and the model."""
    model = StreamedModel.open(folder)
    before = run(model, None).logits
    after = run(model, make_rotate(settings, model))
    return float((after.logits - before).norm() / before.norm()), after, model


@pytest.mark.parametrize("kind", ["hadamard", "orthogonal"])
@pytest.mark.parametrize("name", ROTATED)
def test_logits_of_every_family_stay_and_its_heads_values_are_rotated(
    tiny_model: MakeModel, name: str, kind: RotationKind
) -> None:
    change, done, model = rotate(tiny_model(name), Settings(kind))
    assert change < EXACT
    assert all(record.producer is not None for record in done.records)
    values = [record for record in done.records if (record.detail or "").startswith("values rotated")]
    assert len(values) == len(model.blocks.blocks)


@pytest.mark.parametrize(("hidden_size", "head_dim"), [(48, 12), (72, 18), (52, 16)], ids=lambda size: str(size))
def test_logits_stay_for_sizes_that_are_no_powers_of_two(tmp_path: Path, hidden_size: int, head_dim: int) -> None:
    folder = save_model(tmp_path, "llama", hidden_size=hidden_size, head_dim=head_dim)
    change, done, _ = rotate(folder)
    assert change < EXACT
    assert any(f"2 heads of {head_dim}" in (record.detail or "") for record in done.records)


def test_every_weight_that_touches_the_stream_changes_and_norms_become_one(tiny_model: MakeModel) -> None:
    folder = tiny_model("qwen3")
    _, done, model = rotate(folder)
    for index, block in enumerate(done.blocks):
        for name, stored in model.load_block(index).named_parameters():
            if name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                assert torch.equal(block.get_parameter(name), stored.double())
            elif stored.ndim == 1:
                assert torch.equal(block.get_parameter(name), torch.ones(len(stored), dtype=torch.float64))
            else:
                assert not torch.allclose(block.get_parameter(name), stored.double(), atol=1e-2)


def test_tied_embedding_and_head_become_two_parameters(tiny_model: MakeModel) -> None:
    _, _, model = rotate(tiny_model("qwen2"))
    changes = outside_changes(model)
    assert set(changes.added) == {"lm_head.weight"}
    assert changes.config_updates["tie_word_embeddings"] is False
    assert torch.equal(changes.tensors["model.norm.weight"], torch.ones(HIDDEN))
    assert not torch.allclose(changes.added["lm_head.weight"], changes.tensors["model.embed_tokens.weight"], atol=1e-2)


def test_stored_parameters_end_with_values_that_their_dtype_holds(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "opt", dtype=torch.bfloat16)
    _, done, _ = rotate(folder)
    for block in done.blocks:
        for name, parameter in block.named_parameters():
            if parameter.ndim == 1:
                assert torch.equal(parameter, parameter.bfloat16().double()), name


def test_loud_channel_of_the_stream_is_spread_over_all(tiny_llama: Path) -> None:
    model = StreamedModel.open(tiny_llama)
    embedding = model.module.get_parameter("model.embed_tokens.weight")
    embedding[:, 5] *= 100
    before = float(embedding.abs().max() / embedding.square().mean().sqrt())
    make_rotate(Settings(), model)
    rotated_embedding = model.module.get_parameter("model.embed_tokens.weight")
    after = float(rotated_embedding.abs().max() / rotated_embedding.square().mean().sqrt())
    assert after < before / 2


def test_same_seed_gives_the_same_weights_and_the_callers_random_state_is_untouched(tiny_model: MakeModel) -> None:
    folder = tiny_model("llama")
    state = torch.random.get_rng_state()
    runs = [rotate(folder, Settings(seed=seed)) for seed in (3, 3, 4)]
    assert torch.equal(torch.random.get_rng_state(), state)
    first, again, other = (done.blocks[1].get_parameter("mlp.up_proj.weight") for _, done, _ in runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    heads = [model.module.get_parameter("lm_head.weight") for _, _, model in runs]
    assert torch.equal(heads[0], heads[1])


def test_norm_on_the_way_into_the_stream_is_refused_by_name_before_anything_is_changed(tiny_model: MakeModel) -> None:
    model = StreamedModel.open(tiny_model("gemma3"))
    before = {name: model.module.get_parameter(name).clone() for name in model.outside()}
    with pytest.raises(RecipeError, match=r"model\.layers\.0\.post_attention_layernorm scales channels"):
        make_rotate(Settings(), model)
    assert all(torch.equal(model.module.get_parameter(name), kept) for name, kept in before.items())


def test_norm_on_the_way_into_the_stream_is_rotated_where_it_scales_all_channels_alike(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = save_model(tmp_path, "gemma3") / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "post_attention_layernorm" in name or "post_feedforward_layernorm" in name:
            tensor.fill_(0.25)
    save_file(tensors, path, metadata={"format": "pt"})
    change, _, _ = rotate(tmp_path)
    assert change < EXACT


def test_positions_and_layer_norms_keep_the_mean_of_the_stream(tiny_model: MakeModel) -> None:
    _, _, model = rotate(tiny_model("opt"))
    for name in ("embed_tokens", "embed_positions"):
        stored = model.artifact.tensor(f"model.decoder.{name}.weight")
        found = model.module.get_parameter(f"model.decoder.{name}.weight")
        torch.testing.assert_close(found.mean(-1), stored.mean(-1), atol=1e-6, rtol=0)
        assert not torch.allclose(found, stored, atol=1e-2)


def test_only_targets_keep_more_digits_than_their_dtype(tmp_path: Path) -> None:
    model = StreamedModel.open(save_model(tmp_path, "llama", dtype=torch.bfloat16))
    transform = TRANSFORMS["rotate"](Settings(), model)
    original = model.load_block(0)
    block = copy.deepcopy(original).float()
    linears = {"mlp.up_proj": block.get_submodule("mlp.up_proj")}
    transform(TransformInput(block, original, linears, [], {}, model.blocks.name(0)))  # type: ignore[arg-type]
    rounded = {name: torch.equal(each, each.bfloat16().float()) for name, each in block.named_parameters()}
    assert [name for name, is_rounded in rounded.items() if not is_rounded] == ["mlp.up_proj.weight"]


class Mlp(nn.Module):
    """A block without attention; ``gate`` scales what it adds channel by channel."""

    def __init__(self, gate: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)
        self.gate = gate

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate(self.down(self.up(self.norm(hidden)).relu()))


def rotate_mlp(block: Mlp) -> Any:
    generator = torch.Generator().manual_seed(0)
    rotations = Rotations(make_rotation(12, "hadamard", generator), "hadamard", 0)
    hidden = torch.randn(1, 9, 12, generator=generator, dtype=torch.float64)
    with torch.no_grad(), torch.random.fork_rng():
        return rotated(block.double(), Batch(hidden, {}), rotations, None, "stack.3")


def test_block_without_attention_is_rotated_and_no_heads_are_found() -> None:
    done = rotate_mlp(Mlp())
    assert done.error < 1e-12
    assert done.values is None


def test_block_that_computes_on_channels_one_by_one_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match=r"changes what stack\.3 computes"):
        rotate_mlp(Mlp(gate=torch.tanh))
