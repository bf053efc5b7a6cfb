"""The rows that the table of quantization methods can have, by name: what is made, and by which tool.

A row of ours is the ``quantize:`` section of a recipe, word by word; a row of llm-compressor names its method.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS, LLM_COMPRESSOR = "quantpipe", "llm-compressor"

Section = Mapping[str, Any]

W4, W3 = {"name": "w4a16", "group_size": 64}, {"name": "w3a16", "group_size": 64}
W8A8 = {"name": "w8a8"}
RTN_ABSMAX, RTN_MSE, RTN_HESSIAN = ({"name": "rtn", "scales": scales} for scales in ("absmax", "mse", "hessian"))
GPTQ = {"name": "gptq"}
GPTQ_BOTH = {"name": "gptq", "propagate": "both"}
GPTQ_BOTH_SIGNED = {**GPTQ_BOTH, "signed_scales": True}


@dataclass(frozen=True)
class Row:
    """One way to quantize. ``section`` is ours; ``method``, ``bits`` and ``dtype`` are llm-compressor's.

    ``section`` is None where the full-precision model itself is judged, under the KV cache ``kv_dtype``. ``kind`` says
    which rows compete: those of equal storage.
    """

    name: str
    tool: str
    kind: str
    section: Section | None = None
    method: str = ""
    bits: int = 4
    dtype: str = "auto"
    kv_dtype: str = ""


def _ours(name: str, kind: str, solver: Section, scheme: Section, *transforms: str, **more: Section) -> Row:
    section = {"transforms": [{"name": each} for each in transforms], "solver": solver, "scheme": scheme, **more}
    return Row(name, OURS, kind, section)


def _mixed(percent: int) -> Row:
    """``percent`` of the weights at 8 bits (group 64), the others at 4: both store one 16-bit scale per 64 weights."""
    share = percent / 100
    average_bits = round((1 - share) * 4 + share * 8 + 16 / 64, 4)
    allocate = {"scheme": {"name": "w8a16", "group_size": 64}, "average_bits": average_bits}
    return _ours(f"mixed-{percent}-gptq", "mixed", GPTQ, W4, allocate=allocate)


def _theirs(method: str, kind: str, bits: int = 4) -> list[Row]:
    """As a user gets it, in the dtype the model is stored in; and in float32, which many CPUs compute far faster."""
    name = f"llmc-{method}" if kind == "w4" else f"llmc-{kind}-{method}"
    return [
        Row(name, LLM_COMPRESSOR, kind, method=method, bits=bits),
        Row(f"{name}-float32", f"{LLM_COMPRESSOR} in float32", kind, method=method, bits=bits, dtype="float32"),
    ]


_ROWS: Sequence[Row] = (
    _ours("rtn-absmax", "w4", RTN_ABSMAX, W4),
    _ours("rtn-mse", "w4", RTN_MSE, W4),
    _ours("rtn-hessian", "w4", RTN_HESSIAN, W4),
    _ours("gptq", "w4", GPTQ, W4),
    _ours("gptq-both", "w4", GPTQ_BOTH, W4),
    _ours("awq-rtn", "w4", RTN_HESSIAN, W4, "awq"),
    _ours("awq-gptq", "w4", GPTQ, W4, "awq"),
    _ours("awq-gptq-both", "w4", GPTQ_BOTH, W4, "awq"),
    _ours("rotate-gptq", "w4", GPTQ, W4, "rotate"),
    _ours("rotate-gptq-both", "w4", GPTQ_BOTH, W4, "rotate"),
    _ours("rotate-gptq-both-signed", "w4", GPTQ_BOTH_SIGNED, W4, "rotate"),
    _ours("gptq-asymmetric", "w4 asymmetric", GPTQ, {**W4, "symmetric": False}),
    _ours("w8a8-rtn", "w8a8", RTN_ABSMAX, W8A8),
    _ours("w8a8-smoothquant-rtn", "w8a8", RTN_ABSMAX, W8A8, "smoothquant"),
    _ours("w8a8-smoothquant-gptq", "w8a8", GPTQ, W8A8, "smoothquant"),
    _ours("w8a8-rotate-smoothquant-gptq", "w8a8", GPTQ, W8A8, "rotate", "smoothquant"),
    _mixed(5),
    _mixed(10),
    _ours("w3-gptq", "w3", GPTQ, W3),
    _ours("w3-rotate-gptq-both", "w3", GPTQ_BOTH, W3, "rotate"),
    Row("kv-int8_per_token_head", OURS, "kv", kv_dtype="int8_per_token_head"),
    Row("kv-int8_static", OURS, "kv", kv_dtype="int8_static"),
    Row("kv-k_int8_v_int4", OURS, "kv", kv_dtype="k_int8_v_int4"),
    Row("kv-int4_per_token_head", OURS, "kv", kv_dtype="int4_per_token_head"),
    *_theirs("rtn", "w4"),
    *_theirs("gptq", "w4"),
    *_theirs("awq", "w4"),
    *_theirs("gptq", "w3", bits=3),
    *_theirs("smoothquant-gptq", "w8a8"),
)
ROWS: Mapping[str, Row] = {row.name: row for row in _ROWS}

# Equal method, side by side: ours and theirs.
PAIRS: Mapping[str, tuple[str, str]] = {
    f"{method}{dtype}": (ours, f"{theirs}{dtype}")
    for dtype in ("", "-float32")
    for method, ours, theirs in (
        ("rtn", "rtn-absmax", "llmc-rtn"),
        ("gptq", "gptq", "llmc-gptq"),
        ("awq", "awq-rtn", "llmc-awq"),
        ("smoothquant-gptq", "w8a8-smoothquant-gptq", "llmc-w8a8-smoothquant-gptq"),
    )
}


@dataclass(frozen=True)
class Tokens:
    """How much text: calibration windows of ``window_tokens`` each, and windows of the same length to judge on."""

    num_windows: int = 64
    window_tokens: int = 512
    num_test_windows: int = 8


@dataclass(frozen=True)
class Machine:
    """What the makers may use."""

    threads: int = 2
    nice: int = 0


def named(names: Sequence[str]) -> list[Row]:
    """Rows by name; the name of a kind or of a tool stands for all its rows, ``all`` for every one."""
    found: dict[str, Row] = {}
    for name in names:
        rows = [row for row in _ROWS if name in ("all", row.name, row.kind, row.tool)]
        if not rows:
            raise SystemExit(f"--rows: no row, kind or tool named {name!r}; rows: {', '.join(ROWS)}")
        found |= {row.name: row for row in rows}
    return list(found.values())
