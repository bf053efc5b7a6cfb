import pytest
import torch

from quantpipe.quantize.transforms.hadamard import (
    Rotation,
    hadamard,
    hadamard_factors,
    make_rotation,
    random_orthogonal,
)

# Hidden sizes and head sizes of published models, and sizes that have no Hadamard matrix.
SIZES_WITH_HADAMARD = (2, 12, 20, 28, 36, 48, 64, 72, 76, 96, 128, 576, 768, 896, 960, 1152, 1600, 2880, 3584, 5120)
SIZES_WITHOUT = (1, 3, 6, 10, 50, 54)
EXACT = 1e-12  # float64 sums of a few thousand terms


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrix(rotation: Rotation) -> torch.Tensor:
    return rotation.apply(torch.eye(rotation.size, dtype=torch.float64))


@pytest.mark.parametrize("base", [order for order in range(2, 201) if hadamard_factors(order) == (order,)])
def test_base_matrix_has_unit_entries_and_orthogonal_rows(base: int) -> None:
    found = hadamard(base)
    assert bool((found.abs() == 1).all())
    assert torch.equal(found @ found.T, base * torch.eye(base, dtype=torch.float64))


@pytest.mark.parametrize("size", [size for size in SIZES_WITH_HADAMARD if size <= 576])
def test_every_entry_of_a_hadamard_rotation_is_equally_large(size: int) -> None:
    found = matrix(make_rotation(size, "hadamard", generator()))
    torch.testing.assert_close(found.abs(), torch.full_like(found, size**-0.5), atol=EXACT, rtol=0)


@pytest.mark.parametrize("size", SIZES_WITH_HADAMARD)
def test_product_of_the_factors_is_the_size(size: int) -> None:
    rotation = make_rotation(size, "hadamard", generator())
    assert torch.tensor([len(factor) for factor in rotation.factors]).prod() == size


@pytest.mark.parametrize("size", [*SIZES_WITHOUT, 48, 64, 576])
@pytest.mark.parametrize("kind", ["hadamard", "orthogonal"])
def test_rotation_of_any_size_is_orthogonal(size: int, kind: str) -> None:
    found = matrix(make_rotation(size, kind, generator()))  # type: ignore[arg-type]
    torch.testing.assert_close(found @ found.T, torch.eye(size, dtype=torch.float64), atol=EXACT, rtol=0)


@pytest.mark.parametrize("kind", ["hadamard", "orthogonal"])
def test_fixing_ones_keeps_the_mean_of_every_row(kind: str) -> None:
    rotation = make_rotation(48, kind, generator(), fixes_ones=True)  # type: ignore[arg-type]
    x = torch.randn(5, 48, generator=generator(1), dtype=torch.float64)
    y = rotation.apply(x)
    torch.testing.assert_close(y.mean(-1), x.mean(-1), atol=EXACT, rtol=0)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), atol=EXACT, rtol=0)
    assert float((y - x).norm()) > 1


@pytest.mark.parametrize("kind", ["hadamard", "orthogonal"])
def test_rotation_follows_the_seed_and_leaves_the_callers_random_state(kind: str) -> None:
    before = torch.random.get_rng_state()
    first, again = (matrix(make_rotation(50, kind, generator(7))) for _ in range(2))  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, matrix(make_rotation(50, kind, generator(8))))  # type: ignore[arg-type]


def test_factors_act_as_their_kronecker_product() -> None:
    factors = (
        random_orthogonal(3, generator()),
        random_orthogonal(4, generator(1)),
        random_orthogonal(5, generator(2)),
    )
    signs = torch.randn(60, generator=generator(3), dtype=torch.float64).sign()
    x = torch.randn(2, 7, 60, generator=generator(4), dtype=torch.float64)
    dense = signs.diag() @ torch.kron(torch.kron(factors[0], factors[1]), factors[2])
    torch.testing.assert_close(Rotation(signs, factors).apply(x), x @ dense, atol=EXACT, rtol=0)


def test_rows_are_rotated_in_place_in_their_own_dtype() -> None:
    rotation = make_rotation(12, "hadamard", generator())
    x = torch.randn(9000, 12, generator=generator(1))
    y = x.clone()
    rotation.rotate_rows_(y)
    assert y.dtype == torch.float32
    assert torch.equal(y, rotation.apply(x).float())
