import torch
from torch import nn

from quantpipe.quantize.loop.collecting import GroupStatistics, passes


def linears(**widths: int) -> dict[str, nn.Linear]:
    return {name: nn.Linear(width, 2) for name, width in widths.items()}


def test_groups_are_cut_where_their_statistics_exceed_the_memory() -> None:
    given = linears(a=4, b=4, c=8, d=4)
    groups = [["a"], ["b"], ["c"], ["d"]]
    matrix_bytes = 4 * 4 * 4
    assert list(passes(groups, given, 10 * matrix_bytes)) == [groups]
    assert list(passes(groups, given, 2 * matrix_bytes)) == [[["a"], ["b"]], [["c"]], [["d"]]]
    # one group alone may exceed it: there is no smaller part
    assert list(passes(groups, given, 1)) == [[group] for group in groups]


def test_batches_that_do_not_come_by_count_for_nothing() -> None:
    statistics = GroupStatistics(4, has_cross=False)
    x_TK = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    statistics.update(x_TK, None, 8)
    statistics.update(None, None, 8)
    found = statistics.finish()
    assert found.num_tokens == 5
    assert found.cross_KK is None
    assert torch.allclose(found.hessian_KK, x_TK.T @ x_TK / 5, atol=1e-6)


def test_tokens_are_compared_in_pairs_only_where_both_streams_bring_all_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    x_SLK, full_SLK = (torch.randn(2, 3, 4, generator=generator) for _ in range(2))
    pairs = GroupStatistics(4, has_cross=True)
    pairs.update(x_SLK, full_SLK, 6)
    cross_KK = pairs.finish().cross_KK
    x_TK, full_TK = x_SLK.flatten(0, 1), full_SLK.flatten(0, 1)
    assert cross_KK is not None
    assert torch.allclose(cross_KK, (full_TK - x_TK).T @ x_TK / 6, atol=1e-6)
    for x, x_full in ((x_TK[:4], full_TK[:4]), (x_TK, full_TK[:4]), (x_TK, None)):
        pairs.update(x, x_full, 6)  # an expert: as many tokens need not be the same ones
        assert pairs.finish().cross_KK is None
        pairs = GroupStatistics(4, has_cross=True)
