"""What prompt lookup saves: processor time per new token with guesses and without, on one model in one process.

    python bench/speculation.py --model MODEL --new-tokens 96 --threads 1

Two prompts, decoded greedily by one sequence each: an edit, whose answer repeats most of what it is given, and a free
text, whose answer repeats little. After an untimed turn the engines take turns, in reversed order every other round.
``time per token`` is processor seconds of the whole request over new tokens, the prompt's part taken off; ``ratio`` is
with guesses over without, per round, its geometric mean and 90 % interval. ``same tokens`` is how many of the
new tokens come before the first that differs: where two tokens are equally likely within rounding, more rows in a
product may choose the other.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from quantpipe.bench.latency import paired_ratio, percentile
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.engine.stats import EngineStats
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.gate.record import machine_facts, utc_now
from quantpipe.serve.chat import ChatTemplate

CODE = """def total_price(items, rate):
    total = 0
    for item in items:
        if item.count > 0:
            total += item.price * item.count
    return total * (1 + rate)


def total_weight(items):
    total = 0
    for item in items:
        if item.count > 0:
            total += item.weight * item.count
    return total
"""
PROMPTS = {
    "edit": f"Repeat this code exactly, but rename the variable `total` to `result`:\n\n```python\n{CODE}```",
    "free": "Tell me a story about a lighthouse keeper who finds a letter in a bottle.",
}


@dataclass(frozen=True)
class Turn:
    """One answer: its tokens, and the processor seconds of all steps but the first, which reads the prompt."""

    token_ids: tuple[int, ...]
    cpu_s: float
    num_steps: int

    @property
    def token_s(self) -> float:
        return self.cpu_s / (len(self.token_ids) - 1)


def answer(engine: Engine, prompt_ids: list[int], new_tokens: int) -> Turn:
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    request_id = engine.add(prompt_ids, params)
    while not any(output.token_ids for output in engine.step()):
        pass
    started_s, num_steps = time.process_time(), 0
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
    return Turn(engine.take_output(request_id).token_ids, time.process_time() - started_s, num_steps)


def num_same(first: Turn, second: Turn) -> int:
    pairs = zip(first.token_ids, second.token_ids, strict=True)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(first.token_ids))


def compare(name: str, prompt_ids: list[int], engines: dict[str, Engine], asked: argparse.Namespace) -> str:
    """One row of the table."""
    before = engines["ngram"].stats()
    turns: dict[str, list[Turn]] = {kind: [] for kind in engines}
    for number in range(asked.repeats + 1):
        if number == 1:
            before = engines["ngram"].stats()
        for kind in list(engines) if number % 2 else list(reversed(engines)):
            turn = answer(engines[kind], prompt_ids, asked.new_tokens)
            if number > 0:
                turns[kind].append(turn)
    plain, guessing = turns["none"], turns["ngram"]
    ratio = paired_ratio("token_s", [(one.token_s, other.token_s) for one, other in zip(plain, guessing, strict=True)])
    plain_ms, guessing_ms = (1e3 * percentile([turn.token_s for turn in kind], 50) for kind in (plain, guessing))
    tokens_per_step = (asked.new_tokens - 1) / guessing[0].num_steps
    return (
        f"| {name} | {len(prompt_ids)} | {asked.num_draft_tokens} | {_acceptance(before, engines['ngram'].stats())} | "
        f"{tokens_per_step:.2f} | {plain_ms:.1f} | {guessing_ms:.1f} | {ratio.value:.2f} ({ratio.low:.2f} .. "
        f"{ratio.high:.2f}) | {num_same(plain[0], guessing[0])} of {asked.new_tokens} |"
    )


def _acceptance(before: EngineStats, after: EngineStats) -> str:
    num_drafts = after.draft_tokens - before.draft_tokens
    num_accepted = after.accepted_tokens - before.accepted_tokens
    return f"{num_accepted / max(num_drafts, 1):.2f} of {num_drafts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--prompts", choices=PROMPTS, nargs="+", default=list(PROMPTS))
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    tokenizer = Tokenizer.open(asked.model)
    if tokenizer.chat_template is None:
        raise SystemExit(f"{asked.model}: has no chat template")
    template = ChatTemplate.compile(tokenizer.chat_template, tokenizer.special_tokens)
    engines = {
        kind: Engine.open(
            asked.model,
            EngineConfig(
                backend=asked.backend,
                max_num_seqs=1,
                max_model_len=1024,
                num_threads=asked.threads,
                speculative=kind,
                num_draft_tokens=asked.num_draft_tokens,
            ),
        )
        for kind in ("none", "ngram")
    }
    machine = machine_facts()
    print(f"{utc_now()[:10]}, {machine['cpu']} ({machine['simd']}), {machine['cores']} cores")
    print("| prompt | prompt tokens | K | accepted | tokens per step | without, ms | with, ms | ratio | same tokens |")
    print("|---|---:|---:|---|---:|---:|---:|---|---|")
    for name in asked.prompts:
        prompt_ids = tokenizer.encode(template.render([{"role": "user", "content": PROMPTS[name]}]))
        print(compare(name, prompt_ids, engines, asked), flush=True)


if __name__ == "__main__":
    main()
