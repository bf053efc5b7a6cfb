"""Words that every layer uses in its messages."""


def count_of(number: int, plural: str) -> str:
    """A number and what it counts: ``1 row``, ``1,200 rows``. ``plural`` must end in the s that one of them lacks."""
    return f"{number:,} {plural if number != 1 else plural.removesuffix('s')}"
