"""A plan for programs: plain data whose names end in their units."""

import dataclasses
from typing import Any

from quantpipe.plan.plan import Plan
from quantpipe.plan.shape import ModelShape


def as_json(plan: Plan) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "model": _model(plan.shape),
        "device": dataclasses.asdict(plan.device),
        "load": _load(plan),
        "slo": dataclasses.asdict(plan.slo),
        "memory": {**dataclasses.asdict(plan.memory), "is_fitting": plan.memory.is_fitting},
        "weights_by_scheme": [dataclasses.asdict(row) for row in plan.schemes],
        "fits": [dataclasses.asdict(row) for row in plan.fits],
        "roofline": dataclasses.asdict(plan.roofline),
        "levers": [dataclasses.asdict(lever) for lever in plan.levers],
        "recommendation": dataclasses.asdict(plan.recommendation),
        "quantization_run": None if plan.quantization_run is None else dataclasses.asdict(plan.quantization_run),
        "notes": list(plan.notes),
    }


def _model(shape: ModelShape) -> dict[str, Any]:
    return {
        "where": shape.where,
        "family": shape.family,
        "is_served": shape.is_served,
        "scheme": shape.scheme_label,
        "num_weights": shape.num_weights,
        "num_layers": len(shape.attention),
        "num_kv_heads": shape.attention[0].num_kv_heads,
        "head_dim": shape.attention[0].head_dim,
        "num_windowed_layers": sum(own.window is not None for own in shape.attention),
        "max_position_embeddings": shape.max_positions,
        "is_head_tied": shape.is_head_tied,
    }


def _load(plan: Plan) -> dict[str, Any]:
    own = plan.load
    return {
        "concurrency": own.concurrency,
        "context_tokens": own.context,
        "prompt_tokens": own.prompt_tokens,
        "output_tokens": own.output_tokens,
        "kv_dtype": own.kv_dtype,
    }
