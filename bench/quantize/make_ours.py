"""One artifact of ours, made from the ``quantize`` section of a recipe and a file of token ids.

Run by the other scripts as a process of its own, so that its time and memory are its own. What ``quantpipe run`` does
beside this (drawing calibration data, parity, evaluation) is left out: it is no part of what is compared.
"""

import argparse
import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantpipe.formats.artifact_writer import write_artifact
from quantpipe.formats.digests import KV_SCALES_NAME
from quantpipe.formats.kv_mode import kv_mode
from quantpipe.quantize.by_recipe import open_model, quantize_model
from quantpipe.quantize.kv_int8 import KVObserver
from quantpipe.quantize.loop.records import QuantizedModel
from quantpipe.quantize.loop.sequential import Method, quantize_blocks
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.targets.discover import Targets
from quantpipe.quantize.writing import write_quantized
from quantpipe.recipe.quantize_section import QuantizeSection
from quantpipe.report import Reporter

FINGERPRINT = "bench"


def unquantized_with_scales(model: StreamedModel, token_ids_SL: Any, work: Path, mode: str, artifact: Path) -> None:
    """The full-precision model as it is, with the KV scales that ``mode`` needs, if any, beside it."""
    sidecars = {}
    if kv_mode(mode, "--kv-dtype").needs_scales:
        observer = KVObserver(mode)
        method = Method(transforms=(), solver=solve_rtn, kv=observer)
        quantize_blocks(model, Targets({}, ()), method, token_ids_SL, work, FINGERPRINT, Reporter().progress)
        scales = observer.finish(len(model.blocks.blocks)).scales
        sidecars = {} if scales is None else {KV_SCALES_NAME: scales.tensors()}
    write_artifact(artifact, model.base, {}, None, {}, sidecars=sidecars)


def bits_per_weight(quantized: QuantizedModel) -> float:
    """Stored bits per quantized weight, scales and zero points included."""
    stored_bits = num_weights = 0
    for name, weight in quantized.weights.items():
        stored_bits += 8 * sum(tensor.nbytes for tensor in weight.stored_tensors(name).values())
        num_weights += weight.q_NK.numel()
    return stored_bits / num_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--windows", type=Path, required=True, help="int64 token ids [S, L] as .npy")
    parser.add_argument("--section", type=json.loads, help="a recipe's quantize section, as JSON")
    parser.add_argument("--kv-dtype", default="", help="without --section: leave the weights, calibrate this KV cache")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--phases", type=Path, required=True, help="where to write the seconds of each phase")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = args.artifact.with_suffix(".work")
    shutil.rmtree(work, ignore_errors=True)  # what is timed is a whole run, never the rest of a killed one
    marks = [("load", time.perf_counter(), time.process_time())]
    model = open_model(args.model)
    token_ids_SL = np.load(args.windows)
    marks.append(("quantize", time.perf_counter(), time.process_time()))
    if args.section is None:
        unquantized_with_scales(model, token_ids_SL, work, args.kv_dtype, args.artifact)
        marks.append(("write", time.perf_counter(), time.process_time()))
    else:
        section = QuantizeSection.model_validate(args.section)
        found = quantize_model(section, model, token_ids_SL, work, FINGERPRINT, Reporter())
        marks.append(("write", time.perf_counter(), time.process_time()))
        write_quantized(args.artifact, model, found.model, found.targets, found.record())
    marks.append(("end", time.perf_counter(), time.process_time()))
    bits = None if args.section is None else bits_per_weight(found.model)
    shutil.rmtree(work, ignore_errors=True)
    phases: dict[str, Any] = {
        name: {"wall_s": after[1] - wall_s, "cpu_s": after[2] - cpu_s}
        for (name, wall_s, cpu_s), after in itertools.pairwise(marks)
    }
    args.phases.write_text(json.dumps({**phases, "bits_per_weight": bits}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
