"""Output tokens per second of our engine against ``transformers.generate``, in one process, taking turns.

Every model folder named by ``--engine`` is served by our runtime; ``--reference`` is run by transformers in float32 as
a static batch. All get the same prompts, as many new tokens each (greedy, end token ignored) and the same number of
threads. One untimed turn each, then ``--repeats`` rounds whose order is reversed every other round.
"""

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from quantpipe.bench.latency import paired_ratio, percentile, time_burst
from quantpipe.bench.workload import text_prompts
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.gate.record import machine_facts, utc_now

Prompts = Sequence[Sequence[int]]
Contestant = Callable[[Prompts, int], float]  # prompts, new tokens each -> output tokens per second
REFERENCE = "transformers"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def our_engine(folder: Path, args: argparse.Namespace) -> Contestant:
    """Our runtime on a model folder."""
    config = EngineConfig(
        backend=args.backend,
        max_model_len=args.prompt_tokens + args.new_tokens,
        max_num_seqs=max(args.concurrency),
        num_threads=args.threads,
    )
    engine = Engine.open(folder, config)

    def run(prompts: Prompts, new_tokens: int) -> float:
        _, wall_s = time_burst(folder.name, engine, prompts, new_tokens, CLOCKS[args.clock])
        return len(prompts) * new_tokens / wall_s

    return run


def transformers_generate(folder: Path, args: argparse.Namespace) -> Contestant:
    """transformers in float32, all prompts as one static batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    clock = CLOCKS[args.clock]

    def run(prompts: Prompts, new_tokens: int) -> float:
        greedy = GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        prompt_ids_ST = torch.tensor(prompts)
        started_s = clock()
        with torch.inference_mode():
            output_ids_ST = model.generate(
                prompt_ids_ST, attention_mask=torch.ones_like(prompt_ids_ST), generation_config=greedy
            )
        took_s = clock() - started_s
        num_new = output_ids_ST.shape[1] - prompt_ids_ST.shape[1]
        if num_new != new_tokens:
            raise SystemExit(f"transformers gave {num_new} tokens where {new_tokens} were asked")
        return len(prompts) * new_tokens / took_s

    return run


def library_text() -> str:
    """Prose about Python that every installation carries: the default source of prompts."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics))


def take_turns(
    contestants: dict[str, Contestant], prompts: Sequence[Sequence[int]], concurrency: int, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens per second of each contestant in each round; the first round warms up and is dropped."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(args.repeats + 1):
        burst = prompts[turn * concurrency : (turn + 1) * concurrency]
        names = list(contestants) if turn % 2 else list(reversed(contestants))
        for name in names:
            tok_s = contestants[name](burst, args.new_tokens)
            if turn > 0:
                found[name].append(tok_s)
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, nargs="+", required=True, help="model folders for our runtime")
    parser.add_argument("--reference", type=Path, required=True, help="the float model folder for transformers")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock",
        choices=sorted(CLOCKS),
        default="wall",
        help="cpu: processor time, for a busy machine; use --threads 1",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    token_ids = Tokenizer.open(args.reference).encode(library_text())
    contestants = {REFERENCE: transformers_generate(args.reference, args)}
    contestants |= {folder.name: our_engine(folder, args) for folder in args.engine}
    machine = machine_facts()
    where = f"{utc_now()[:10]} | {machine['cpu']} ({machine['simd']}), {machine['cores']} cores"
    command = f"--prompt-tokens {args.prompt_tokens} --new-tokens {args.new_tokens} --repeats {args.repeats}"
    command += f" --threads {args.threads} --clock {args.clock}"
    print("| date | machine | command | model | concurrency | ours, tok/s | other, tok/s | ratio |")
    print("|---|---|---|---|---:|---:|---:|---|")
    for concurrency in args.concurrency:
        num_prompts = concurrency * (args.repeats + 1)
        prompts = text_prompts(token_ids, num_prompts, args.prompt_tokens, args.seed + concurrency)
        found = take_turns(contestants, prompts, concurrency, args)
        other = percentile(found[REFERENCE], 50)
        for name in list(contestants)[1:]:
            ours = percentile(found[name], 50)
            ratio = paired_ratio("output_tok_s_ratio", list(zip(found[REFERENCE], found[name], strict=True)))
            cells = f"{name} ({args.backend}) | {concurrency} | {ours:.1f} | {other:.1f}"
            print(
                f"| {where} | `{command}` | {cells} | {ratio.value:.2f} ({ratio.low:.2f} .. {ratio.high:.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
