"""Cases run one by one, a row each. A case that raises is wrong, and the next one runs all the same."""

from collections.abc import Iterable, Iterator

import torch

from quantpipe.doctor.cases.case import Case
from quantpipe.doctor.record import Row


def kernel_rows(cases: Iterable[Case], device: torch.device) -> Iterator[Row]:
    """``error`` is a multiple of what is allowed."""
    for case in cases:
        row: Row = {"kernel": case.kernel, "dtype": str(case.dtype).removeprefix("torch."), "case": case.what}
        try:
            error = case.run(device)
        except Exception as failure:  # whatever Triton or the driver raises
            yield row | {"error": None, "ok": False, "raised": f"{type(failure).__name__}: {_line(failure)}"}
            continue
        yield row | {"error": round(error, 4), "ok": error <= 1}


def _line(failure: Exception) -> str:
    return " ".join(str(failure).split())[:200]
