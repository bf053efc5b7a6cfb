"""Every kernel in every dtype against float64 on small inputs: one table for a GPU and for Triton's interpreter."""

import torch

from quantpipe.doctor.cases.attention import attention_cases
from quantpipe.doctor.cases.cache import cache_cases
from quantpipe.doctor.cases.case import Case
from quantpipe.doctor.cases.linears import linear_cases
from quantpipe.doctor.cases.rows import row_cases

GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The interpreter computes with numpy, which has no bfloat16: what a repair of it shows is for tests to say.
INTERPRETER_DTYPES = (torch.float32, torch.float16)


def cases_for(device: torch.device) -> list[Case]:
    """All cases of a device, kernel by kernel."""
    dtypes = GPU_DTYPES if device.type == "cuda" else INTERPRETER_DTYPES
    tables = (linear_cases, row_cases, cache_cases, attention_cases)
    return [case for table in tables for case in table(dtypes)]
