"""How much a shadow is to answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ShadowOptions:
    """``share`` of the requests (0 to 1, which ones the ``seed`` decides), at most ``max_open`` choices at a time."""

    share: float = 1.0
    max_open: int = 16
    seed: int = 0
