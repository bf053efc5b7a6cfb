"""Scales that suit what is rounded with them: searched for the least error, weighted by how much inputs matter.

Shapes: N out_features (n of them at a time), K in_features, G groups along K of g columns each.
"""

import torch
from torch import Tensor

from quantpipe.formats.layout import cast_scale, encode, zero_point
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.solvers.solver import Solution

# Candidate ranges as fractions of what covers every weight: some far apart, then steps to either side of the best; at
# last the scale that fits the best one's integers by least squares. Clipping the largest weights pays, the more so the
# fewer the bits.
FRACTIONS = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52, 0.44)
STEPS = (0.04, 0.02)
# So many weights at a time stay in the cache over all candidates, and are worth the cost of a call.
WEIGHTS_AT_ONCE = 1 << 18


def round_weight(
    weight_NK: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    importance_K: Tensor | None = None,
    signed: bool = False,
) -> Solution:
    """Round to nearest with the scales of ``search_scale``."""
    scale_NG, zero_NG = search_scale(weight_NK, scheme, scale_dtype, importance_K, signed)
    return Solution(encode(weight_NK, scale_NG, scheme, zero_NG), scale_NG, zero_NG)


def search_scale(
    weight_NK: Tensor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    importance_K: Tensor | None = None,
    signed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Scales [N, G] and zero points [N, G] (None if symmetric) with the least squared rounding error of each group.

    Errors are weighted with ``importance_K``: the mean square of each input, which is the Hessian's diagonal. The
    scales that cover the whole range are among the candidates, so none ends worse than rounding to nearest with those.
    ``signed`` tries negative scales too, for symmetric schemes: the integers reach one further below zero than above.
    """
    num_in = weight_NK.shape[1]
    num_groups = scheme.num_groups(num_in)
    root_Gg = torch.ones(num_groups, num_in // num_groups)
    if importance_K is not None:
        root_Gg = importance_K.clamp_min(0).sqrt().reshape(num_groups, -1)
    scales, zeros = [], []
    for rows_nK in torch.split(weight_NK.float(), max(1, WEIGHTS_AT_ONCE // num_in)):
        search = _Search(rows_nK.reshape(len(rows_nK), num_groups, -1), root_Gg, scheme, scale_dtype)
        search.run((1.0, -1.0) if signed and scheme.symmetric else (1.0,))
        scales.append(search.scale_nG)
        if search.zero_nG is not None:
            zeros.append(search.zero_nG)
    return torch.cat(scales), torch.cat(zeros) if zeros else None


class _Search:
    """The best scales so far of some rows: ``scale_nG`` and ``zero_nG``, and the fraction that they came from."""

    def __init__(self, weight_nGg: Tensor, root_Gg: Tensor, scheme: WeightScheme, scale_dtype: torch.dtype) -> None:
        self._weight_nGg, self._root_Gg, self._scheme, self._scale_dtype = weight_nGg, root_Gg, scheme, scale_dtype
        self._levels_nGg = torch.empty_like(weight_nGg)
        self._low_nG, self._high_nG = weight_nGg.amin(-1).clamp_max(0), weight_nGg.amax(-1).clamp_min(0)
        self._fraction_nG = torch.ones_like(self._low_nG)
        self._sign_nG = torch.ones_like(self._low_nG)
        self.scale_nG, self.zero_nG = self._scale(self._fraction_nG, self._sign_nG)
        self._error_nG = self._error(self.scale_nG, self.zero_nG)

    def run(self, signs: tuple[float, ...]) -> None:
        for fraction in FRACTIONS:
            for sign in signs:
                self._try(torch.full_like(self._fraction_nG, fraction), torch.full_like(self._sign_nG, sign))
        for step in STEPS:
            best_nG, sign_nG = self._fraction_nG, self._sign_nG
            for fraction_nG in (best_nG + step, best_nG - step):
                self._try(fraction_nG.clamp_max(1.0), sign_nG)
        self._fit()

    def _try(self, fraction_nG: Tensor, sign_nG: Tensor) -> None:
        better_nG = self._consider(*self._scale(fraction_nG, sign_nG))
        self._fraction_nG = torch.where(better_nG, fraction_nG, self._fraction_nG)
        self._sign_nG = torch.where(better_nG, sign_nG, self._sign_nG)

    def _fit(self) -> None:
        """Try the scale that suits the integers of the best one: sum of h w q over sum of h q^2.

        Steps are too wide for a group in which one input outweighs all others: its weight should be met exactly.
        """
        levels_nGg = self._levels(self.scale_nG, self.zero_nG).mul_(self._root_Gg)
        energy_nG = levels_nGg.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        fitted_nG = (self._weight_nGg * self._root_Gg).mul_(levels_nGg).sum(-1) / energy_nG
        # A fit of the other sign is clamped to next to nothing, and loses.
        scale_nG = cast_scale(fitted_nG * self._sign_nG, self._scale_dtype) * self._sign_nG.to(self._scale_dtype)
        self._consider(scale_nG, self.zero_nG)

    def _consider(self, scale_nG: Tensor, zero_nG: Tensor | None) -> Tensor:
        """Take these over in the groups where they are better; which those are."""
        error_nG = self._error(scale_nG, zero_nG)
        better_nG = error_nG < self._error_nG
        self._error_nG = torch.where(better_nG, error_nG, self._error_nG)
        self.scale_nG = torch.where(better_nG, scale_nG, self.scale_nG)
        if zero_nG is not None and self.zero_nG is not None:
            self.zero_nG = torch.where(better_nG, zero_nG, self.zero_nG)
        return better_nG

    def _scale(self, fraction_nG: Tensor, sign_nG: Tensor) -> tuple[Tensor, Tensor | None]:
        """The format's own scale (and zero point) of a range cut down to ``fraction_nG`` of it."""
        num_steps = 2**self._scheme.bits - 1
        if not self._scheme.symmetric:
            range_nG = (self._high_nG - self._low_nG) * fraction_nG
            scale_nG = cast_scale(range_nG / num_steps, self._scale_dtype)
            return scale_nG, zero_point(self._low_nG * fraction_nG, scale_nG, self._scheme)
        absmax_nG = torch.maximum(-self._low_nG, self._high_nG) * fraction_nG
        return cast_scale(absmax_nG / (num_steps / 2), self._scale_dtype) * sign_nG.to(self._scale_dtype), None

    def _error(self, scale_nG: Tensor, zero_nG: Tensor | None) -> Tensor:
        """Weighted rounding error [n, G] (the norm, not its square)."""
        levels_nGg = self._levels(scale_nG, zero_nG)
        levels_nGg.mul_(scale_nG.float().unsqueeze(-1)).sub_(self._weight_nGg).mul_(self._root_Gg)
        error_nG: Tensor = torch.linalg.vector_norm(levels_nGg, dim=-1)
        return error_nG

    def _levels(self, scale_nG: Tensor, zero_nG: Tensor | None) -> Tensor:
        """Integers less zero points [n, G, g], by the rule of ``layout.encode``; valid until the next call."""
        scheme, levels_nGg = self._scheme, self._levels_nGg
        torch.div(self._weight_nGg, scale_nG.float().unsqueeze(-1), out=levels_nGg)
        if zero_nG is None:
            return levels_nGg.round_().clamp_(scheme.q_min, scheme.q_max)
        zero_nG1 = zero_nG.float().unsqueeze(-1)
        return levels_nGg.add_(zero_nG1).round_().clamp_(scheme.q_min, scheme.q_max).sub_(zero_nG1)
