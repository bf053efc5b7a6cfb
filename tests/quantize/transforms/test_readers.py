from pathlib import Path

import torch
from architectures import MakeModel
from first_block import given_block
from torch import nn

from quantpipe.quantize.model.block_runs import Batch
from quantpipe.quantize.transforms.pair_candidates import ScalePair
from quantpipe.quantize.transforms.pairs import find_pairs
from quantpipe.quantize.transforms.readers import (
    InputStatistics,
    largest_per_channel,
    mean_per_channel,
    observe,
    some_sequences,
)

SHARED = ScalePair("v", ("o",), torch.tensor([0, 1, 0, 1]), torch.arange(2))


def test_the_first_token_is_not_sampled_and_counts_no_more_than_the_loudest_other() -> None:
    inputs = InputStatistics(3, tokens_per_sequence=4)
    x_SLK = torch.tensor([[[900.0, 0.0, 1.0], [0.5, 4.0, 0.0], [-1.0, 2.0, 0.25]]])
    inputs.update(x_SLK)
    assert torch.equal(inputs.sample_TK, x_SLK[0, 1:])
    assert torch.equal(inputs.absmax_K, torch.tensor([4.0, 4.0, 1.0]))
    assert torch.equal(inputs.mean_abs_K, torch.tensor([0.75, 3.0, 0.125]))
    assert torch.equal(inputs.mean_square_K, torch.tensor([0.625, 10.0, 0.03125]))


def test_rows_that_a_router_picked_all_count() -> None:
    inputs = InputStatistics(1, tokens_per_sequence=4)
    inputs.update(torch.tensor([[[900.0], [1.0]]]), has_first_tokens=False)
    assert inputs.sample_TK.flatten().tolist() == [900.0, 1.0]
    assert inputs.absmax_K.tolist() == [900.0]


def test_a_sequence_of_one_token_counts() -> None:
    inputs = InputStatistics(1, tokens_per_sequence=4)
    inputs.update(torch.tensor([[[5.0]]]))
    assert inputs.absmax_K.tolist() == inputs.mean_abs_K.tolist() == [5.0]


def test_sampled_tokens_are_spread_over_the_sequence() -> None:
    inputs = InputStatistics(1, tokens_per_sequence=3)
    inputs.update(torch.arange(18.0).reshape(2, 9, 1))
    assert inputs.sample_TK.flatten().tolist() == [1.0, 5.0, 8.0, 10.0, 14.0, 17.0]


def test_statistics_do_not_depend_on_how_sequences_are_cut_into_batches() -> None:
    x_SLK = torch.randn(6, 9, 4, generator=torch.Generator().manual_seed(0))
    whole, parts = InputStatistics(4, 2), InputStatistics(4, 2)
    whole.update(x_SLK)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 6)):
        parts.update(x_SLK[rows])
    assert torch.equal(whole.absmax_K, parts.absmax_K)
    assert torch.equal(whole.sample_TK, parts.sample_TK)
    # float64 sums in another order
    torch.testing.assert_close(whole.mean_square_K, parts.mean_square_K)


class Batches(list[Batch]):
    """Four batches of three sequences, the last of one, each token telling which it is."""

    def __init__(self) -> None:
        hidden = torch.arange(10.0).reshape(10, 1, 1).expand(10, 4, 1)
        super().__init__(Batch(hidden[start : start + 3], {}) for start in range(0, 10, 3))


def test_some_sequences_are_spread_over_the_calibration_set() -> None:
    found = [float(batch.hidden_SLD[0, 0, 0]) for batch in some_sequences(Batches(), 16)]
    assert found == [0.0, 3.0, 6.0, 9.0]
    assert len(some_sequences(Batches(), 1)) == 1
    assert [float(batch.hidden_SLD[0, 0, 0]) for batch in some_sequences(Batches(), 1000)] == list(range(10))


def test_columns_that_share_a_channel_are_taken_together() -> None:
    value_K = torch.tensor([1.0, 2.0, 3.0, 8.0])
    assert largest_per_channel(value_K, SHARED).tolist() == [3.0, 8.0]
    assert mean_per_channel(value_K, SHARED).tolist() == [2.0, 5.0]


def test_each_expert_is_measured_on_the_tokens_routed_to_it(tiny_model: MakeModel, tmp_path: Path) -> None:
    given = given_block(tiny_model("mixtral"), tmp_path)
    pairs, _ = find_pairs(given.block, given.linears, given.batches[0])
    norm = next(pair for pair in pairs if pair.producer == "post_attention_layernorm")
    (readers,) = observe(given.block, [norm], given.batches, 64)
    assert [each.names for each in readers] == [
        (f"mlp.experts.{number}.gate_proj", f"mlp.experts.{number}.up_proj") for number in range(4)
    ]
    # 4 sequences of 32 tokens, 2 of 4 experts for each token
    assert sum(each.inputs.num_tokens for each in readers) == 4 * 32 * 2


def test_linears_without_a_token_are_left_out() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(4, 4)
            self.unused = nn.Linear(4, 4)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.used(hidden)

    every = torch.arange(4)
    pairs = [ScalePair("norm", (name,), every, every) for name in ("used", "unused")]
    seen = observe(Block(), pairs, [Batch(torch.ones(1, 3, 4), {})], 8)
    assert [[each.names for each in readers] for readers in seen] == [[("used",)], []]
