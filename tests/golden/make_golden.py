"""Writes the golden artifacts and their logits. Run it only when the meaning of the format changes on purpose.

python tests/golden/make_golden.py
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from quantpipe.formats.artifact import Artifact
from quantpipe.formats.artifact_writer import quantization_config, write_artifact
from quantpipe.formats.scheme import w4a16, w8a8
from quantpipe.quantize.fake_quant import simulated_logits
from quantpipe.quantize.loop.sequential import Method, quantize_blocks
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.solver import SolverOptions
from quantpipe.quantize.targets.discover import find_targets
from quantpipe.report import no_progress

FOLDER = Path(__file__).parent
TOKEN_IDS = [3, 14, 15, 9, 26, 5, 35, 8]


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    with tempfile.TemporaryDirectory() as base:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(base)
        write_golden(Path(base))


def write_golden(base: Path) -> None:
    model = StreamedModel.open(base)
    method = Method([], solve_rtn, SolverOptions(scales="absmax"))
    for name, scheme in (("w4a16", w4a16(32)), ("w8a8", w8a8())):
        targets = find_targets(model.module, model.blocks, ["lm_head"], scheme)
        with tempfile.TemporaryDirectory() as work_folder:
            quantized = quantize_blocks(model, targets, method, None, Path(work_folder), name, no_progress)
            declared = quantization_config(targets.schemes, list(targets.ignored))
            write_artifact(FOLDER / name, Artifact.open(base), quantized.weights, declared, {"kv_cache": "auto"})
            logits = simulated_logits(model, quantized, np.array([TOKEN_IDS]))[0]
        save_file({"token_ids": torch.tensor(TOKEN_IDS), "logits": logits.contiguous()}, FOLDER / f"{name}.logits")


if __name__ == "__main__":
    main()
