"""Three ways to the same logits: simulated in transformers, reloaded by transformers, served by our runtime.

A release whose served numbers differ from the ones that were optimised has gone wrong somewhere between the solver
and the kernel, whatever its scores say.

Shapes: T positions of the probe, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from quantpipe.gate_report import ParityRow

# Int8 activation rules: what vLLM and our runtime run, and what compressed-tensors simulates inside transformers.
SERVED_DIVISOR, TRANSFORMERS_DIVISOR = 127.0, 127.5

# Mean KL in nats. Reloading repeats the same float32 products, so nothing but the order of sums may differ.
RELOADED_TOLERANCE = 1e-5
# Our kernels sum in another order, and a value that then rounds to the next 8-bit step moves everything after it;
# 4-bit kernels may also read bfloat16 activations. A wrong scale, zero point or position is far above this.
SERVED_TOLERANCE = 1e-2

PROBE_TEXT = (
    "Our support team answers within one working day. Please keep the order number at hand, so that we can look up "
    "your parcel at once.\n\ndef mean(values):\n    return sum(values) / len(values)\n\nThe river rises in the hills, "
    "crosses the plain and reaches the sea near an old harbour town. 您好,请问有什么可以帮您? 1, 2, 3, 5, 8, 13."
)

FakeLogits = Callable[[npt.NDArray[np.int64], float], Tensor]
"""Token ids [1, T] and the activation divisor -> float32 logits [1, T, V] of the fake-quantized model."""


def check_parity(
    fake_logits: FakeLogits, folder: Path, config: EngineConfig, trust_remote_code: bool = False
) -> list[ParityRow]:
    """Compare the three on a fixed text; the runtime both reading the text at once and token by token.

    The KV cache is in the compute dtype here: transformers has no quantized one to compare with.
    """
    token_ids = Tokenizer.open(folder).encode(PROBE_TEXT)
    token_ids_ST = np.array([token_ids], dtype=np.int64)
    served_TV = fake_logits(token_ids_ST, SERVED_DIVISOR)[0]
    reloaded_TV = fake_logits(token_ids_ST, TRANSFORMERS_DIVISOR)[0]
    num_tokens = len(token_ids)
    alone = replace(config, kv_dtype="auto", max_num_seqs=1, max_model_len=num_tokens + 1)
    whole = replace(alone, max_num_batched_tokens=num_tokens)
    one_by_one = replace(alone, max_num_batched_tokens=1)
    return [
        ParityRow(
            "fake-quantized vs. reloaded by transformers, mean KL",
            mean_kl(reloaded_TV, _reloaded_logits(folder, token_ids_ST, trust_remote_code)),
            RELOADED_TOLERANCE,
        ),
        ParityRow(
            "fake-quantized vs. served, text read at once, mean KL",
            mean_kl(served_TV, _served_logits(folder, token_ids, whole)),
            SERVED_TOLERANCE,
        ),
        ParityRow(
            "fake-quantized vs. served, token by token, mean KL",
            mean_kl(served_TV, _served_logits(folder, token_ids, one_by_one)),
            SERVED_TOLERANCE,
        ),
    ]


def require_parity(rows: Sequence[ParityRow], folder: Path) -> None:
    """Raise ArtifactError for the first comparison that does not agree."""
    for row in rows:
        if not row.agrees:
            raise ArtifactError(
                f"{folder}: parity: {row.comparison} is {row.found:.3g}, above the tolerance {row.tolerance:g}; this "
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
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        attn_implementation="sdpa",
    ).eval()
    with torch.inference_mode():
        logits_TV: Tensor = model(input_ids=torch.from_numpy(token_ids_ST), use_cache=False).logits[0].float()
    return logits_TV


def _served_logits(folder: Path, token_ids: Sequence[int], config: EngineConfig) -> Tensor:
    rows: dict[int, npt.NDArray[np.float32]] = {}

    def keep(first: int, logits_RV: npt.NDArray[np.float32]) -> None:
        rows.update((first + offset, row.copy()) for offset, row in enumerate(logits_RV))

    engine = Engine.open(folder, config)
    engine.generate([token_ids], SamplingParams(max_tokens=0, ignore_eos=True), prompt_logits_sinks=[keep])
    return torch.from_numpy(np.stack([rows[position] for position in range(len(token_ids))]))
