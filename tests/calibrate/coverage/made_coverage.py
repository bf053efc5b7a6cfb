"""Coverages made up of round numbers, for tests of how they are shown."""

from typing import Any

import numpy as np

from quantpipe.calibration.calibration_set import CalibrationSet, Document
from quantpipe.calibration.views.coverage import Coverage, measure_coverage
from quantpipe.quantize.activation_coverage import ActivationCoverage, InputCoverage
from quantpipe.quantize.channel_ranges import BeyondRange, CurvePoint

ROLES = ("self_attn.q_proj", "mlp.down_proj")


def text_coverage(domains: tuple[str, ...] = ("cards", "loans"), **held_out: Any) -> Coverage:
    documents = tuple(
        Document(f"rows.csv:{i}", "rows.csv", domain, "en", 40 + 100 * i, 40) for i, domain in enumerate(domains)
    )
    ids = np.arange(40 * len(domains)).reshape(1, -1)
    return measure_coverage(CalibrationSet("tickets", ids, 1, (), "0" * 64, documents=documents), 400, held_out)


def activations(
    domains: tuple[str, ...] = ("cards", "loans"), num_blocks: int = 3, num_points: int = 4, **fields: Any
) -> ActivationCoverage:
    """The share beyond the range grows with the block, and is largest in the second domain's last down_proj."""
    inputs = tuple(
        InputCoverage(
            block,
            role,
            (role,),
            999,
            tuple(CurvePoint(2**i, 0.1 * (num_points - 1 - i), 0.2 * (num_points - 1 - i)) for i in range(num_points)),
            tuple(
                BeyondRange(name, 1000, 10 * block + number + 5 * index, 1.5 + block)
                for index, name in enumerate(domains)
            ),
        )
        for block in range(num_blocks)
        for number, role in enumerate(ROLES)
    )
    return ActivationCoverage(8, 128, num_blocks, domains, inputs, **fields)
