"""What choosing tokens costs: microseconds of processor time per row, by features asked for, vocabulary and batch.

    python bench/sampler.py --vocab 49152 151936 --batch 1 32 256 --context 2000

Logits are normal with a few likely tokens on top, so that a nucleus holds tens to thousands of tokens. Each figure is
the fastest of several passes over the batch; the last row adds a context 16 times as long, which should cost no more
than the tokens in it that are new.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from quantpipe.engine.sampled import Sampled
from quantpipe.engine.sampler import sample
from quantpipe.engine.sampling_params import SamplingParams

EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    top_k=50,
    min_p=0.02,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.2,
    logit_bias={7: -100.0, 8: 2.0},
    min_tokens=10**9,
    stop_token_ids=(1, 2),
)
FEATURES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "greedy + penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2),
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=0.8, top_k=50),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95),
    "min-p": SamplingParams(temperature=0.8, min_p=0.02),
    "everything": EVERYTHING,
}


def make_logits(num_rows: int, vocab_size: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(0)
    logits_RV = rng.standard_normal((num_rows, vocab_size), dtype=np.float32) * 2
    likely = rng.integers(0, vocab_size, (num_rows, 20))
    np.put_along_axis(logits_RV, likely, rng.uniform(6, 14, likely.shape).astype(np.float32), axis=-1)
    return logits_RV


def make_requests(params: SamplingParams, num_rows: int, vocab_size: int, context: int) -> list[Sampled]:
    """Half of the context is prompt, half was generated."""
    rng = np.random.default_rng(1)
    requests = []
    for row in range(num_rows):
        token_ids = (vocab_size * rng.random(context) ** 2).astype(np.int64).tolist()
        requests.append(Sampled(params, token_ids[: context // 2], row, (0,)).after(token_ids[context // 2 :]))
    return requests


def us_per_row(work: Callable[[], object], num_rows: int, budget_s: float) -> float:
    """The fastest pass, in processor time, so that other programs weigh little."""
    best_s, spent_s = float("inf"), 0.0
    while spent_s < budget_s:
        started_s = time.process_time()
        work()
        passed_s = time.process_time() - started_s
        best_s, spent_s = min(best_s, passed_s), spent_s + passed_s
    return best_s / num_rows * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--context", type=int, default=2000, help="tokens of prompt and output that penalties see")
    parser.add_argument("--budget-s", type=float, default=0.5, help="processor time for each figure")
    asked = parser.parse_args()
    for vocab_size in asked.vocab:
        logits_RV = make_logits(max(asked.batch), vocab_size)
        print(f"\nvocabulary {vocab_size:,}, us per row | " + " | ".join(f"batch {batch}" for batch in asked.batch))
        rows = [(name, params, asked.context) for name, params in FEATURES.items()]
        for name, params, context in [*rows, ("everything, 16 x context", EVERYTHING, 16 * asked.context)]:
            figures = []
            for batch in asked.batch:
                work = partial(sample, logits_RV[:batch], make_requests(params, batch, vocab_size, context))
                figures.append(us_per_row(work, batch, asked.budget_s))
            print(f"{name} | " + " | ".join(f"{figure:.0f}" for figure in figures))


if __name__ == "__main__":
    main()
