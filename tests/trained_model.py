"""The committed trained model, made harder to quantize, quantized, and compared with itself on text of its kind."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.fake_quant import simulated_logits
from quantpipe.quantize.loop.sequential import Method, QuantizedModel, quantize_blocks
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.solver import Solver, SolverOptions
from quantpipe.quantize.targets.discover import find_blocks, find_targets
from quantpipe.quantize.transforms.transform import Transform
from quantpipe.report import no_progress

TokenIds = npt.NDArray[np.int64]
NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def text_of(folder: Path, num_sequences: int) -> tuple[TokenIds, TokenIds]:
    """Calibration windows of 128 tokens, and two held out."""
    import json.decoder as source

    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(Path(str(source.__file__)).read_text()).input_ids
    windows = np.array(ids[: (num_sequences + 2) * 128], dtype=np.int64).reshape(-1, 128)
    return windows[:-2], windows[-2:]


def with_outliers(folder: Path, target: Path, factor: float = 30.0) -> Path:
    """The model of ``folder`` with one channel of each norm's output loud; what reads it undoes that."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    for block in find_blocks(model).blocks:
        for norm, readers in NORMS.items():
            block.get_parameter(f"{norm}.weight").data[5] *= factor
            for reader in readers:
                block.get_parameter(f"{reader}.weight").data[:, 5] /= factor
    model.save_pretrained(target)  # type: ignore[operator]  # every transformers model has it
    return target


def quantize(
    folder: Path,
    work: Path,
    scheme: WeightScheme,
    transforms: Sequence[Transform] = (),
    token_ids: TokenIds | None = None,
    solver: Solver = solve_rtn,
    scales: str = "absmax",
    overrides: Sequence[tuple[tuple[str, ...], WeightScheme]] = (),
) -> QuantizedModel:
    model = StreamedModel.open(folder)
    targets = find_targets(model.module, model.blocks, ["lm_head"], scheme, overrides)
    options = SolverOptions(scales=scales)  # type: ignore[arg-type]  # one of the three
    method = Method(list(transforms), solver, options, reads_data=scales == "hessian", propagate="quantized")
    return quantize_blocks(model, targets, method, token_ids, work, "fingerprint", no_progress)


def divergence(folder: Path, quantized: QuantizedModel, token_ids: TokenIds) -> float:
    """Mean KL from the model of ``folder``."""
    model = StreamedModel.open(folder)
    with torch.no_grad():
        expected = simulated_logits(model, None, token_ids).log_softmax(-1)
        found = simulated_logits(model, quantized, token_ids).log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())
