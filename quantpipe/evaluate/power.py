"""How many items a limit needs before its verdict can be anything but UNSURE. Arithmetic; knows no suite.

Normal approximations for planning; verdicts themselves come from the intervals of ``paired``.
"""

import math
from dataclasses import dataclass

from scipy.special import ndtri

from quantpipe.evaluate.intervals import DEFAULT_CONFIDENCE

POWER = 0.80


@dataclass(frozen=True)
class DropPower:
    """What ``num_items`` can say about a limit on lost accuracy; ``margin_frac`` 0.01 is 1 point.

    ``needed`` items pass a candidate that loses nothing with a chance of ``POWER``; with fewer than ``least`` none
    passes, whatever it does: not even without a flip. Both None where no number of items would do: a margin of 0.
    ``failed_frac`` is the smallest true loss that is failed with that chance, 1 or more where none is.
    """

    margin_frac: float
    num_items: int
    needed: int | None
    least: int | None
    failed_frac: float

    @property
    def can_pass(self) -> bool:
        """Whether any outcome passes."""
        return self.least is not None and self.num_items >= self.least

    @property
    def is_enough(self) -> bool:
        """Whether a candidate that loses nothing is likely to pass."""
        return self.needed is not None and self.num_items >= self.needed


def drop_power(
    margin_frac: float,
    num_items: int,
    discordance_frac: float,
    design_effect: float = 1.0,
    confidence: float = DEFAULT_CONFIDENCE,
) -> DropPower:
    """The power of a paired comparison where ``discordance_frac`` of the items flip, equally often both ways.

    ``design_effect`` is how many items of the suite weigh as one independent one. The number needed is that of Tango's
    score test (Statistics in Medicine 17, 1998): the variance is the restricted one where the loss is the margin, and
    the discordance where there is none. The least number is where his interval of no flip, z^2 / (n + z^2), ends at the
    margin.
    """
    z, z_power = float(ndtri(0.5 + confidence / 2)), float(ndtri(POWER))
    both = z + z_power
    failed = _failed_loss(margin_frac, num_items / design_effect, discordance_frac, both)
    if margin_frac <= 0:
        return DropPower(margin_frac, num_items, None, None, failed)
    least = math.ceil(design_effect * z**2 * (1 - margin_frac) / margin_frac)
    spread = z * math.sqrt(_restricted_variance(margin_frac, discordance_frac)) + z_power * math.sqrt(discordance_frac)
    needed = math.ceil(design_effect * (spread / margin_frac) ** 2)
    return DropPower(margin_frac, num_items, max(needed, least), least, failed)


def _restricted_variance(margin_frac: float, discordance_frac: float) -> float:
    """Of one item's difference, where the most likely shares of flips are taken that differ by the margin."""
    b, c = 2 * margin_frac - discordance_frac, discordance_frac / 2 * margin_frac * (1 - margin_frac)
    gained_frac = (math.sqrt(b * b + 8 * c) - b) / 4
    return 2 * gained_frac + margin_frac * (1 - margin_frac)


def _failed_loss(margin_frac: float, num_effective: float, discordance_frac: float, both: float) -> float:
    """The loss whose interval lies wholly beyond the margin with a chance of ``POWER``."""
    if num_effective <= 0:
        return math.inf
    loss = margin_frac
    for _ in range(50):  # the loss is part of the discordance that widens the interval
        loss = margin_frac + both * math.sqrt(max(discordance_frac, loss) / num_effective)
    return loss


def mean_power(
    half_width: float, num_samples: int, distance: float, confidence: float = DEFAULT_CONFIDENCE
) -> int | None:
    """About how many samples decide about a mean that is ``distance`` from its limit, with a chance of ``POWER``.

    ``half_width`` is that of the interval that ``num_samples`` gave. None where there is no distance or no interval.
    """
    if distance <= 0 or not math.isfinite(half_width):
        return None
    z = float(ndtri(0.5 + confidence / 2))
    return math.ceil(num_samples * (half_width / distance * (z + float(ndtri(POWER))) / z) ** 2)
