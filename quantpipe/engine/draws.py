"""Random numbers that depend on a request's seed and a token's index only. Knows nothing else."""


def uniform(seed: int, index: int) -> float:
    """The ``index``-th number in [0, 1) of a seed: SplitMix64 (Steele, Lea and Flood 2014), addressed directly."""
    mask = (1 << 64) - 1
    z = _mix64(seed & mask) + (index + 1) * 0x9E3779B97F4A7C15
    return (_mix64(z & mask) >> 11) * 2.0**-53


def sample_seed(seed: int, index: int) -> int:
    """The seed of the ``index``-th sample of a request: the request's own for the first."""
    if index == 0:
        return seed
    mask = (1 << 64) - 1
    return _mix64(_mix64(seed & mask) ^ _mix64(index))


def _mix64(z: int) -> int:
    mask = (1 << 64) - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
