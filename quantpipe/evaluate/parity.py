"""Three ways to the same logits: simulated in transformers, reloaded by transformers, served by our runtime.

A release whose served numbers differ from the ones that were optimised has gone wrong somewhere between the solver
and the kernel, whatever its scores say.

Shapes: S sequences (one here), T positions of the probe, V vocabulary.
"""

import gc
import math
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.gate.report import ParityRow
from quantpipe.quantize.fake_quant import SERVED, TRANSFORMERS, simulated_logits
from quantpipe.quantize.loop.records import QuantizedModel
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.model.suspended import return_free_memory

# Tolerances are mean KL in nats.
# Nothing but the order of float32 sums may differ.
EXACT_TOLERANCE = 1e-5
# 4-bit kernels may read bfloat16 activations.
SERVED_TOLERANCE = 1e-2
# Rounding activations to 8 bits is chaotic: a last-bit difference moves some value to the next step, and that moves
# others. Two right implementations are as far apart as one is from itself after a nudge of its embeddings, so that
# distance is measured on the model at hand; a wrong scale, position or weight is far above it.
NUDGE = 1e-6
NOISE_FACTOR = 3.0

# What transformers takes at its peak to load an artifact, for each byte that its weights have in float32.
# Measured on Llamas of 92 million weights: 1.50 to 1.57, in w4a16 and w8a8, of bfloat16 and of float32.
RELOADED_FRAC = 1.5
FLOAT32_BYTES = 4

PROBE_TEXT = (
    "Our support team answers within one working day. Please keep the order number at hand, so that we can look up "
    "your parcel at once.\n\ndef mean(values):\n    return sum(values) / len(values)\n\nThe river rises in the hills, "
    "crosses the plain and reaches the sea near an old harbour town. 您好,请问有什么可以帮您? 1, 2, 3, 5, 8, 13."
)


def memory_shortage(base: Artifact, available_bytes: int) -> str | None:
    """Why parity of an artifact of ``base`` cannot be measured within ``available_bytes``; None where it can."""
    num_weights = sum(math.prod(tensor.spec.shape) for tensor in base.stored.values())
    needed = int(RELOADED_FRAC * FLOAT32_BYTES * num_weights)
    if needed <= available_bytes:
        return None
    return (
        f"parity needs about {needed / 1e9:.2f} GB of memory (transformers loads the artifact whole, in float32), and "
        f"{available_bytes / 1e9:.2f} GB are available"
    )


def check_parity(
    quantized: QuantizedModel | None,
    base_folder: Path,
    folder: Path,
    config: EngineConfig | None,
    trust_remote_code: bool = False,
) -> list[ParityRow]:
    """Compare them on a fixed text: the base model first, then the artifact, which the runtime reads both at once and
    token by token. The base model is opened anew, and loaded one block at a time. ``config`` None: the runtime does not
    serve this model, and only the first two ways are compared.

    The KV cache is in the compute dtype here: transformers has no quantized one to compare with, nor
    windows of an engine's own. Activations are as close as the default: what rounding them more costs is for the gate.
    """
    token_ids = Tokenizer.open(folder).encode(PROBE_TEXT)
    token_ids_ST = np.array([token_ids], dtype=np.int64)
    model = StreamedModel.open(base_folder, trust_remote_code)
    as_reloaded_TV = simulated_logits(model, quantized, token_ids_ST, TRANSFORMERS)[0]
    reloaded_TV = _reloaded_logits(folder, token_ids_ST, trust_remote_code)
    reloaded = ParityRow("simulated, reloaded by transformers", mean_kl(as_reloaded_TV, reloaded_TV), EXACT_TOLERANCE)
    if config is None:
        return [reloaded]
    num_tokens = len(token_ids)
    alone = replace(
        config, kv_dtype="auto", max_num_seqs=1, max_model_len=num_tokens + 1, sink_tokens=0, window_tokens=None
    )
    if config.activations == "int8":
        alone = replace(alone, activations="int16")
    at_once, one_by_one = (replace(alone, max_num_batched_tokens=budget) for budget in (num_tokens, 1))
    base_TV = simulated_logits(model, None, token_ids_ST)[0]
    simulated_TV = simulated_logits(model, quantized, token_ids_ST, SERVED)[0]
    nudged_TV = simulated_logits(model, quantized, token_ids_ST, SERVED, nudge=NUDGE)[0]
    tolerance = max(SERVED_TOLERANCE, NOISE_FACTOR * mean_kl(simulated_TV, nudged_TV))
    base_served_TV = _served_logits(base_folder, token_ids, at_once)
    served_TV, decoded_TV = (_served_logits(folder, token_ids, settings) for settings in (at_once, one_by_one))
    return [
        ParityRow("base model: transformers, served", mean_kl(base_TV, base_served_TV), EXACT_TOLERANCE),
        reloaded,
        ParityRow("simulated, served (text at once)", mean_kl(simulated_TV, served_TV), tolerance),
        ParityRow("simulated, served (token by token)", mean_kl(simulated_TV, decoded_TV), tolerance),
    ]


def compares_served(rows: Sequence[ParityRow]) -> bool:
    """Whether what is served was among what was compared."""
    return any("served" in row.comparison for row in rows)


def require_parity(rows: Sequence[ParityRow], folder: Path) -> None:
    """Raise ArtifactError for the first comparison that does not agree."""
    for row in rows:
        if not row.agrees:
            raise ArtifactError(
                f"{folder}: parity: {row.comparison}: mean KL {row.found:.3g} is above {row.tolerance:.3g}; this "
                "artifact does not compute what was quantized and must not be released"
            )


def mean_kl(expected_TV: Tensor, found_TV: Tensor) -> float:
    """Mean KL(expected || found) over positions, in nats; infinite where shapes differ or a logit is not finite."""
    if expected_TV.shape != found_TV.shape or not bool(torch.isfinite(found_TV).all()):
        return float("inf")
    expected_TV = expected_TV.double().log_softmax(-1)
    found_TV = found_TV.double().log_softmax(-1)
    return max(0.0, float((expected_TV.exp() * (expected_TV - found_TV)).sum(-1).mean()))


def _reloaded_logits(folder: Path, token_ids_ST: npt.NDArray[np.int64], trust_remote_code: bool) -> Tensor:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    # Zero points are read only so: otherwise they are expected unpacked.
    is_asymmetric = any(not scheme.symmetric for scheme in Artifact.open(folder).schemes.values())
    settings = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_asymmetric else {}
    # compressed-tensors draws bars, when it loads and when it first runs, that no setting turns off
    with redirect_stderr(StringIO()), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            attn_implementation="sdpa",
            **settings,
        ).eval()
        logits_TV: Tensor = model(input_ids=torch.from_numpy(token_ids_ST), use_cache=False).logits[0].float().clone()
    del model
    _let_go()
    return logits_TV


def _served_logits(folder: Path, token_ids: Sequence[int], config: EngineConfig) -> Tensor:
    rows: dict[int, npt.NDArray[np.float32]] = {}

    def keep(first: int, logits_RV: npt.NDArray[np.float32]) -> None:
        rows.update((first + offset, row.copy()) for offset, row in enumerate(logits_RV))

    engine = Engine.open(folder, config)
    engine.generate([token_ids], SamplingParams(max_tokens=0, ignore_eos=True), prompt_logits_sinks=[keep])
    del engine
    _let_go()
    return torch.from_numpy(np.stack([rows[position] for position in range(len(token_ids))]))


def _let_go() -> None:
    """Free models that nothing refers to but themselves (hooks, threads), before the next is opened."""
    gc.collect()
    return_free_memory()
