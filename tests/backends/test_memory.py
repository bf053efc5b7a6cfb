import subprocess
import sys

import torch

from quantpipe.backends.memory import lazy_zeros

# In a process of its own: the memory of this one depends on the tests before.
RESIDENT_BYTES_OF_A_GIGABYTE = """
import resource, torch
from quantpipe.backends.memory import lazy_zeros
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pool = lazy_zeros((1 << 28,), torch.float32)
pool[:1000] = 1
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, float(pool[1000:2000].sum()))
"""


def test_unused_pool_takes_no_memory_and_reads_as_zero() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT_BYTES_OF_A_GIGABYTE], capture_output=True, text=True, check=True
    )
    resident_bytes, total = done.stdout.split()
    assert int(resident_bytes) < 1 << 26
    assert float(total) == 0.0


def test_shape_and_dtype_are_as_asked() -> None:
    zeros = lazy_zeros((2, 3), torch.int8)
    assert zeros.shape == (2, 3)
    assert zeros.dtype is torch.int8
    zeros[1, 2] = 5
    assert zeros.tolist() == [[0, 0, 0], [0, 0, 5]]
