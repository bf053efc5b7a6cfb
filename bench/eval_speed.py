"""The same lm-eval tasks asked through our engine and through lm-eval's own Hugging Face model, taking turns.

    python bench/eval_speed.py --model MODEL --suite evals/quickstart --items 40 --repeats 3 --threads 1

Each round takes the first items of every task of the suite. Times are processor time of the process by default: other
programs may run beside it. ``--clock wall`` is for an idle machine. ``ratio`` is lm-eval's time / ours, per round, its
geometric mean and 90 % interval. Answers must agree: the script says on how many items scores differ.
"""

import argparse
import contextlib
import dataclasses
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantpipe.bench.latency import paired_ratio, percentile
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.evaluate.eval_task import EvalTask
from quantpipe.evaluate.lm import EngineLM
from quantpipe.evaluate.suite import load_suite
from quantpipe.evaluate.tasks import lm_eval_contained, lm_eval_task
from quantpipe.gate.record import machine_facts, utc_now

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


def scores(lm: Any, tasks: list[EvalTask]) -> list[float]:
    """Each item's score, through lm-eval's evaluator."""
    with lm_eval_contained(), contextlib.redirect_stderr(io.StringIO()):
        loaded = {"tasks": {task.name: lm_eval_task(task) for task in tasks}}
        samples = evaluate(lm, loaded, bootstrap_iters=0, log_samples=True)["samples"]
    return [float(sample[task.metric]) for task in tasks for sample in samples[task.name]]


def models(asked: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """How to begin each side anew: loaded once, and no round finds what another has computed."""
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    other = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=asked.batch)
    config = EngineConfig(
        backend=asked.backend, max_num_seqs=asked.batch, num_threads=asked.threads, kv_cache_memory=256 << 20
    )
    codec = Tokenizer.open(asked.model)
    return {"lm-eval": lambda: other, "ours": lambda: EngineLM(Engine.open(asked.model, config), codec)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--suite", type=Path, default=Path("evals/quickstart"))
    parser.add_argument("--items", type=int, default=40, help="of each task")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    listed = [task for task in load_suite(asked.suite).tasks if isinstance(task, EvalTask)]
    tasks = [dataclasses.replace(task, docs=task.docs[: asked.items]) for task in listed]
    sides, clock = models(asked), CLOCKS[asked.clock]
    times_s: dict[str, list[float]] = {name: [] for name in sides}
    found: dict[str, list[float]] = {}
    for number in range(asked.repeats + 1):
        for name, begin in sides.items():
            lm = begin()
            started_s = clock()
            found[name] = scores(lm, tasks if number else [dataclasses.replace(t, docs=t.docs[:4]) for t in tasks])
            if number:  # the first round warms up
                times_s[name].append(clock() - started_s)
    num_items, num_apart = len(found["ours"]), sum(a != b for a, b in zip(found["ours"], found["lm-eval"], strict=True))
    ratio = paired_ratio("ratio", list(zip(times_s["ours"], times_s["lm-eval"], strict=True)))
    print(f"{utc_now()}; {machine_facts()}; {asked.model.name}, {num_items} items, {asked.clock} time\n")
    print("| lm-eval, s (median) | ours, s (median) | ratio | scores that differ |\n|---:|---:|---:|---:|")
    medians = [f"{percentile(times_s[name], 50):.1f}" for name in ("lm-eval", "ours")]
    print(f"| {' | '.join(medians)} | {ratio.value:.2f} ({ratio.low:.2f} .. {ratio.high:.2f}) | {num_apart} |")


if __name__ == "__main__":
    main()
