"""One llm-compressor artifact, made in llm-compressor's own environment. Knows nothing of quantpipe.

Run by ``vs_llmcompressor.py`` and ``quantize_table.py`` as a process of its own, so that its time and memory are its
own. Recipes are those of the project's own examples; group size, symmetry and tokens are those of the comparison.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM

IGNORED = ["lm_head"]
SMOOTHING_STRENGTH = 0.8  # as in llm-compressor's W8A8 example


def recipe_of(method: str, bits: int, group_size: int) -> list[Any]:
    """The modifiers of ``rtn``, ``gptq``, ``awq`` (integer weights of ``bits``) or ``smoothquant-gptq`` (W8A8)."""
    if method == "smoothquant-gptq":
        smooth = SmoothQuantModifier(smoothing_strength=SMOOTHING_STRENGTH)
        return [smooth, GPTQModifier(targets="Linear", scheme="W8A8", ignore=IGNORED)]
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    if method == "gptq":
        return [GPTQModifier(config_groups=groups, ignore=IGNORED)]
    rounded = QuantizationModifier(config_groups=groups, ignore=IGNORED)
    return {"rtn": [rounded], "awq": [AWQModifier(), rounded]}[method]


def without_pinning() -> None:
    """AWQ pins its caches whatever the machine, which fails where there is no accelerator."""
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda self, batch_index, input_names=None: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--windows", type=Path, required=True, help="int64 token ids [S, L] as .npy")
    parser.add_argument("--method", choices=("rtn", "gptq", "awq", "smoothquant-gptq"), required=True)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--dtype", choices=("auto", "float32"), default="auto", help="auto: as the model is stored")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--phases", type=Path, required=True, help="where to write the seconds of each phase")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    without_pinning()
    marks = [("load", time.perf_counter(), time.process_time())]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
    token_ids_SL = np.load(args.windows)
    marks.append(("quantize", time.perf_counter(), time.process_time()))
    data: dict[str, Any] = {}
    if args.method != "rtn":  # round to nearest reads no data
        rows = {"input_ids": token_ids_SL.tolist(), "attention_mask": np.ones_like(token_ids_SL).tolist()}
        num_windows, window_tokens = token_ids_SL.shape
        data = {
            "dataset": Dataset.from_dict(rows),
            "num_calibration_samples": num_windows,
            "max_seq_length": window_tokens,
            "shuffle_calibration_samples": False,
            "batch_size": args.batch_size,
        }
    recipe = recipe_of(args.method, args.bits, args.group_size)
    oneshot(model=model, tokenizer=str(args.model), recipe=recipe, **data)
    marks.append(("write", time.perf_counter(), time.process_time()))
    model.save_pretrained(args.artifact, save_compressed=True)
    marks.append(("end", time.perf_counter(), time.process_time()))
    phases = {
        name: {"wall_s": after[1] - wall_s, "cpu_s": after[2] - cpu_s}
        for (name, wall_s, cpu_s), after in itertools.pairwise(marks)
    }
    args.phases.write_text(json.dumps(phases) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
