"""Which rows are kept out of calibration, for evaluation: decided by a hash, so that nothing has to be remembered.

All rows of one group (a customer, a thread) have one key and fall on one side, in every source, run and process.
"""

import hashlib

from quantpipe.calibration.text.words import normalised


def group_key(group: str | None) -> str | None:
    """A group's id as it is compared: without white space around; None where there is none."""
    return (group or "").strip() or None


def holdout_key(group: str | None, text: str) -> str:
    """What decides a row's side: its group; without one its normalised text, so that equal texts stay together."""
    key = group_key(group)
    return f"text\n{normalised(text)}" if key is None else f"group\n{key}"


def is_held_out(key: str, salt: str, frac: float) -> bool:
    """Whether ``key`` belongs to the share ``frac`` (0 to 1) of all keys that is held out.

    The key's hash, keyed by ``salt``, is read as a number in [0, 1) and compared with ``frac``: 0 holds out nothing, 1
    everything, and a larger ``frac`` with the same salt holds out the same keys and more. Another salt splits anew.
    """
    if not 0.0 <= frac <= 1.0:
        raise ValueError(f"frac is {frac}; allowed: 0 to 1")
    salted = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=salted).digest()
    return int.from_bytes(digest, "big") < int(frac * 2.0**64)
