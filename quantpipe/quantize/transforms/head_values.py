"""Where the values of attention heads leave one matrix and enter another: seen in the values of one run, then proved.

Between the two every head mixes tokens but not channels, so a rotation of each head's channels may pass from the matrix
that makes the values to the one that reads the heads. Heads that share keys and values share it.

Shapes: K columns of the matrix that reads the heads, R rows of the one that makes the values, H KV heads, V head size.
Source: Liu et al. 2024, "SpinQuant: LLM Quantization with Learned Rotations", section 3.1, R2.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from quantpipe.quantize.transforms.hadamard import Rotation
from quantpipe.quantize.transforms.stream import PROOF_TOLERANCE, StreamTrace, StreamUsers


@dataclass(frozen=True)
class HeadValues:
    """``producer`` makes each KV head's values in ``size`` rows from one of ``starts``; ``consumer`` reads the heads.

    ``head_starts``: for each ``size`` columns of the consumer in turn, the first row of the producer they come from.
    """

    producer: str
    consumer: str
    size: int
    head_starts: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.head_starts)))

    def rotate(self, block: nn.Module, rotations: Mapping[int, Rotation]) -> None:
        """Rotate the values that start at each row by the rotation given for it, and undo that in the consumer."""
        producer = block.get_submodule(self.producer)
        parameters = dict(producer.named_parameters(recurse=False))
        for start, rotation in rotations.items():
            rows = slice(start, start + self.size)
            rotation.rotate_rows_(parameters["weight"][rows].T)
            if "bias" in parameters:
                rotation.rotate_rows_(parameters["bias"][rows].unsqueeze(0))
        weight_NK = block.get_parameter(f"{self.consumer}.weight")
        for number, start in enumerate(self.head_starts):
            rotations[start].rotate_rows_(weight_NK[:, number * self.size : (number + 1) * self.size])


def candidates(users: StreamUsers, trace: StreamTrace, likely_size: int | None) -> Iterator[HeadValues]:
    """Head values as the run shows them, ``likely_size`` first and then from the largest head size down.

    The first token attends to itself alone: what its heads give out are copies of its values. A size that is too large
    shows as well where each head has values of its own, and is for the proof to refuse.
    """
    readers = {name for group in users.readers for name in group.names}
    made = {name: y_TN for name, y_TN in trace.gives if name in readers}
    for consumer, x_TK in trace.reads:
        if consumer in users.writers:
            width = x_TK.shape[-1]
            sizes = [size for size in range(width, 1, -1) if width % size == 0]
            sizes.sort(key=lambda size: size != likely_size)
            for producer, y_TR in made.items():
                for size in sizes if _is_in(x_TK[0], y_TR[0]) else ():
                    starts = _starts(x_TK[0], y_TR[0], size)
                    if starts is not None:
                        yield HeadValues(producer, consumer, size, starts)


def _is_in(x_K: Tensor, y_R: Tensor) -> bool:
    """Whether every element of ``x_K`` is one of ``y_R``."""
    sorted_R = y_R.sort().values
    right_K = torch.searchsorted(sorted_R, x_K).clamp_max(len(sorted_R) - 1)
    left_K = (right_K - 1).clamp_min(0)
    distance_K = torch.minimum((sorted_R[right_K] - x_K).abs(), (sorted_R[left_K] - x_K).abs())
    return bool((distance_K <= PROOF_TOLERANCE * x_K.abs().max()).all())


def _starts(x_K: Tensor, y_R: Tensor, size: int) -> tuple[int, ...] | None:
    """Where in ``y_R`` each ``size`` elements of ``x_K`` are found; None where some are not, or they overlap there."""
    if size > len(y_R):
        return None
    windows_WV = y_R.unfold(0, size, 1)
    starts: list[int] = []
    for part_V in x_K.reshape(-1, size):
        is_here_W = ((windows_WV - part_V).abs() <= PROOF_TOLERANCE * x_K.abs().max()).all(-1)
        if not bool(is_here_W.any()):
            return None
        starts.append(int(is_here_W.nonzero()[0]))
    distinct = sorted(set(starts))
    overlaps = any(later - earlier < size for earlier, later in pairwise(distinct))
    return None if overlaps else tuple(starts)
