"""Time to the first token behind a long system prompt that many requests share: before it is known, and after.

    python bench/prefix_cache.py --model MODEL --system-tokens 1024 --question-tokens 32 --repeats 5 --threads 1

Each round takes another system prompt, a window of the Python documentation, and asks three requests that end in
different questions: one in an engine without prefix cache, then two in one with it, of which the first finds nothing
(``cold``) and the second the system prompt (``warm``). Times are processor time of the process from adding the request
to its first token: what else the machine does is not in them. ``ratio`` is that to the time without prefix cache, per
round, its geometric mean and 90 % interval.
"""

import argparse
import importlib
import time
from pathlib import Path

from quantpipe.bench.latency import paired_ratio, percentile
from quantpipe.bench.workload import text_prompts
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.gate.record import machine_facts, utc_now


def first_token_s(engine: Engine, prompt_ids: tuple[int, ...]) -> tuple[float, int]:
    """Processor seconds, and how many tokens of the prompt were found."""
    started_s = time.process_time()
    request_id = engine.add(prompt_ids, SamplingParams(max_tokens=1, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    return time.process_time() - started_s, engine.take_output(request_id).num_cached_tokens


def rounds(engines: dict[str, Engine], asked: argparse.Namespace, text_ids: list[int]) -> dict[str, list[float]]:
    prompts = text_prompts(text_ids, asked.repeats + 1, asked.system_tokens, asked.seed)
    questions = text_prompts(text_ids, 3 * (asked.repeats + 1), asked.question_tokens, asked.seed + 1)
    times_s: dict[str, list[float]] = {"off": [], "cold": [], "warm": []}
    for number, system_ids in enumerate(prompts):
        for kind, question_ids in zip(times_s, questions[3 * number :], strict=False):
            took_s, num_found = first_token_s(engines["off" if kind == "off" else "on"], system_ids + question_ids)
            most = asked.system_tokens - asked.system_tokens % 16
            if num_found != (most if kind == "warm" else 0):
                raise SystemExit(f"{kind}: {num_found} tokens were found, not what the bench is about")
            if number > 0:  # the first round warms up
                times_s[kind].append(took_s)
    return times_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--system-tokens", type=int, default=1024)
    parser.add_argument("--question-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    text_ids = Tokenizer.open(asked.model).encode("\n".join(topics[name] for name in sorted(topics)))
    max_model_len = asked.system_tokens + asked.question_tokens + 16
    engines = {
        name: Engine.open(
            asked.model,
            EngineConfig(
                backend=asked.backend,
                max_num_seqs=2,
                max_model_len=max_model_len,
                num_kv_blocks=4 * -(-max_model_len // 16),
                num_threads=asked.threads,
                prefix_cache=name == "on",
            ),
        )
        for name in ("off", "on")
    }
    print(f"{utc_now()}; {machine_facts()}; {asked.model.name}\n")
    times_s = rounds(engines, asked, text_ids)
    print("| prefix cache | first token, s (median) | ratio |\n|---|---:|---:|")
    for kind, own in times_s.items():
        ratio = paired_ratio(kind, list(zip(times_s["off"], own, strict=True)))
        print(f"| {kind} | {percentile(own, 50):.3f} | {ratio.value:.3f} ({ratio.low:.3f} .. {ratio.high:.3f}) |")


if __name__ == "__main__":
    main()
