"""Items of a made-up suite, as both models would answer them, and a comparison of them."""

from collections.abc import Mapping, Sequence

from quantpipe.evaluate.comparison import Comparison
from quantpipe.evaluate.items import ItemResult


def item(
    number: int,
    score: float,
    task: str = "intent",
    domain: str = "support",
    cluster: str | None = None,
    margin: float | None = None,
    slices: Mapping[str, str] | None = None,
    prediction: str | None = None,
) -> ItemResult:
    """Item ``i<number>``; its prediction says whether it is right, unless it is given."""
    return ItemResult(
        task,
        f"i{number}",
        domain,
        cluster or f"c{number}",
        score,
        "same",
        "answer",
        prediction if prediction is not None else f"scores {score}",
        margin,
        dict(slices or {}),
    )


def comparison(base: Sequence[float], cand: Sequence[float], cluster_size: int = 1, **fields: object) -> Comparison:
    """Items with these scores, ``cluster_size`` of them in a cluster; ``fields`` are those of ``item``."""
    return Comparison(
        tuple(
            (
                item(n, b, cluster=f"c{n // cluster_size}", **fields),  # type: ignore[arg-type]
                item(n, c, cluster=f"c{n // cluster_size}", **fields),  # type: ignore[arg-type]
            )
            for n, (b, c) in enumerate(zip(base, cand, strict=True))
        )
    )


def flipped(num_items: int, num_lost: int, num_gained: int = 0, **fields: object) -> Comparison:
    """The first items are lost, the next gained, the rest right in both."""
    base = [float(not num_lost <= n < num_lost + num_gained) for n in range(num_items)]
    cand = [float(n >= num_lost) for n in range(num_items)]
    return comparison(base, cand, **fields)  # type: ignore[arg-type]
