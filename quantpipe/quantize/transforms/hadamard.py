"""Orthogonal matrices that spread a vector over all its channels: Hadamard ones where the size has one, random ones.

A rotation R is kept as signs and Kronecker factors, R = diag(s) (F1 x F2 x ...), so that applying it to D channels
costs D times the sum of the factors' sizes, not D^2. Everything is float64. Knows no model.

Shapes: D channels, T rows, Q order of a matrix of residues.
Sources: Sylvester 1867 (products of Hadamard matrices); Paley 1933, "On orthogonal matrices" (orders q + 1 and
2 (q + 1) for primes q).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

RotationKind = Literal["hadamard", "orthogonal"]

# Factors are multiplied out up to this size: few passes over the channels, each still much cheaper than a full product.
LARGEST_MERGED = 64
# Rows that are rotated at once: what a rotation adds to memory does not grow with a vocabulary.
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal matrix R [D, D] = diag(``signs_D``) (F1 x F2 x ...) with ``factors`` F of any sizes.

    ``label`` says in words what it is made of.
    """

    signs_D: Tensor
    factors: tuple[Tensor, ...]
    label: str = "orthogonal"

    @property
    def size(self) -> int:
        return len(self.signs_D)

    def apply(self, x_TD: Tensor) -> Tensor:
        """x R in float64 for rows of any leading shape."""
        y = (x_TD.double() * self.signs_D).reshape(-1, self.size)
        before, after = 1, self.size
        for factor in self.factors:
            after //= len(factor)
            y = torch.einsum("tbfa,fg->tbga", y.reshape(-1, before, len(factor), after), factor)
            before *= len(factor)
        return y.reshape(x_TD.shape)

    def rotate_rows_(self, x_TD: Tensor) -> None:
        """x <- x R, in place and in the dtype of ``x_TD``, computed in float64."""
        for start in range(0, len(x_TD), ROWS_AT_ONCE):
            part_TD = x_TD[start : start + ROWS_AT_ONCE]
            part_TD.copy_(self.apply(part_TD))


def make_rotation(size: int, kind: RotationKind, generator: torch.Generator, fixes_ones: bool = False) -> Rotation:
    """A rotation of ``size`` channels drawn from ``generator``, the same for the same state of it.

    ``hadamard``: a Hadamard matrix with random signs; where the size has no known one, the largest that divides it,
    mixed by a random orthogonal factor. ``orthogonal``: evenly drawn from all orthogonal matrices. ``fixes_ones``:
    leaves the mean of the channels as it is (R 1 = 1), as norms that subtract it need; no Hadamard matrix does, so both
    kinds are then random in the other directions.
    """
    ones_D = torch.ones(size, dtype=torch.float64)
    if fixes_ones:
        return Rotation(ones_D, (_orthogonal_fixing_ones(size, generator),), "random, mean kept")
    if kind == "orthogonal":
        return Rotation(ones_D, (random_orthogonal(size, generator),), "random")
    signs_D = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    order = next(order for order in range(size, 0, -1) if size % order == 0 and hadamard_factors(order) is not None)
    bases = hadamard_factors(order) or ()
    factors = _merged(hadamard(base) / base**0.5 for base in bases)
    if order == size:
        return Rotation(signs_D, tuple(factors), f"hadamard {size}")
    rest = size // order
    return Rotation(signs_D, (*factors, random_orthogonal(rest, generator)), f"hadamard {order} x random {rest}")


def random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """An orthogonal matrix drawn evenly (Haar): Q of a Gaussian matrix, signed so that R's diagonal is positive."""
    gaussian_DD = torch.randn(size, size, generator=generator, dtype=torch.float64)
    q_DD, r_DD = torch.linalg.qr(gaussian_DD)
    rotation_DD: Tensor = q_DD * r_DD.diagonal().sign()
    return rotation_DD.contiguous()


@cache
def hadamard_factors(order: int) -> tuple[int, ...] | None:
    """Orders of Paley's and Sylvester's matrices whose product is ``order``; None where there are none."""
    if order == 1:
        return ()
    for base in range(2, order + 1):
        if order % base == 0 and _is_base_order(base):
            rest = hadamard_factors(order // base)
            if rest is not None:
                return (base, *rest)
    return None


def hadamard(base: int) -> Tensor:
    """The Hadamard matrix (entries 1 and -1) of one of the orders that ``hadamard_factors`` names."""
    if base == 2:
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    if _is_paley_one(base):
        return torch.eye(base, dtype=torch.float64) + _bordered(base - 1, corner_sign=-1.0)
    eye = torch.eye(base // 2, dtype=torch.float64)
    plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(_bordered(base // 2 - 1, corner_sign=1.0), plus) + torch.kron(eye, minus)


def _bordered(prime: int, corner_sign: float) -> Tensor:
    """Paley's matrix [Q + 1, Q + 1]: whether i - j is a square modulo Q (1 or -1, 0 on the diagonal), with a border."""
    squares = {number * number % prime for number in range(1, prime)}
    residue_Q = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, prime)], dtype=torch.float64)
    difference_QQ = (torch.arange(prime).unsqueeze(1) - torch.arange(prime)) % prime
    bordered = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    bordered[0, 1:] = 1.0
    bordered[1:, 0] = corner_sign
    bordered[1:, 1:] = residue_Q[difference_QQ]
    return bordered


def _is_base_order(order: int) -> bool:
    return order == 2 or _is_paley_one(order) or _is_paley_two(order)


def _is_paley_one(order: int) -> bool:
    return order % 4 == 0 and _is_prime(order - 1)


def _is_paley_two(order: int) -> bool:
    return order % 4 == 0 and (order // 2 - 1) % 4 == 1 and _is_prime(order // 2 - 1)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _merged(factors: Iterable[Tensor]) -> list[Tensor]:
    """Neighbouring factors multiplied out as long as the product stays small."""
    merged: list[Tensor] = [torch.ones(1, 1, dtype=torch.float64)]
    for factor in factors:
        if len(merged[-1]) * len(factor) <= LARGEST_MERGED or len(merged[-1]) == 1:
            merged[-1] = torch.kron(merged[-1], factor)
        else:
            merged.append(factor)
    return merged


def _orthogonal_fixing_ones(size: int, generator: torch.Generator) -> Tensor:
    """H diag(1, Q) H with Q random and H the reflection that swaps the first axis and the direction of all ones."""
    inner_DD = torch.eye(size, dtype=torch.float64)
    inner_DD[1:, 1:] = random_orthogonal(size - 1, generator)
    normal_D = torch.full((size,), -(size**-0.5), dtype=torch.float64)
    normal_D[0] += 1.0
    normal_D /= normal_D.norm().clamp_min(torch.finfo(torch.float64).tiny)
    reflection_DD = torch.eye(size, dtype=torch.float64) - 2 * torch.outer(normal_D, normal_D)
    return reflection_DD @ inner_DD @ reflection_DD
