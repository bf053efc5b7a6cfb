"""Few rows take another order of the same product."""

import pytest
import torch

from quantpipe.backends.cpu.matmul import MAX_TRANSPOSED_ROWS, matmul


@pytest.mark.parametrize("num_rows", [0, 1, 2, MAX_TRANSPOSED_ROWS, MAX_TRANSPOSED_ROWS + 1])
def test_every_row_count_gives_the_same_product(num_rows: int) -> None:
    weight_NK = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    x_TK = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(1))
    y_TN = matmul(x_TK, weight_NK)
    assert y_TN.is_contiguous()
    torch.testing.assert_close(y_TN, x_TK @ weight_NK.T)
