"""Continuous batching against dynamic and static batches, on the requests of a real trace.

    python bench/batching_modes.py TRACE.csv --num-requests 200 --scale 0.25 --load 0.8
    python bench/batching_modes.py TRACE.csv --num-requests 40 --scale 0.05 --load 0.8 --model MODEL --threads 1

Without ``--model`` the scheduler runs on a simulated clock; ``simulation.py`` says what a step costs there. With it the
engine runs the model, and its clock is the processor time of the process: what else the machine does is not in it.

Requests come at ``--load`` times the rate that continuous batching serves when all are there from the beginning.
A dynamic batch is formed of what waits when the one before has ended, a static one when ``--max-num-seqs`` wait or
nothing has come for ``--static-wait-s`` seconds. Both leave the places of sequences that ended empty until all have.

Columns: output tokens per second from the first arrival to the last token; seconds to the first token; seconds between
two tokens of a request; seconds to the last token; and padding efficiency: were all sequences that get a token in a
step computed as one rectangle, as long as the longest context and with a row for each place of the batch, ended ones
included, the share of it that is filled.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from request_trace import at_load, describe, read_trace
from simulation import Arrival, Served, Simulation

from quantpipe.engine.batching import BATCHING_MODES
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.engine.scheduler import Scheduler
from quantpipe.engine.step import Step

# Seconds until all was served, what was, and padding efficiency.
Outcome = tuple[float, list[Served], float]
Runner = Callable[[str, list[Arrival]], Outcome]


class Rectangles:
    """The context tokens of decoding sequences, and the area of the smallest rectangles around them."""

    def __init__(self, mode: str) -> None:
        self._keeps_places = mode != "continuous"
        self._num_places = 0
        self._num_tokens = self._area = 0

    @property
    def efficiency_frac(self) -> float:
        return self._num_tokens / max(self._area, 1)

    def begin_batch(self) -> None:
        self._num_places = 0

    def add(self, context_lens: list[int]) -> None:
        if not context_lens:
            return
        kept = self._num_places if self._keeps_places else 0
        self._num_places = max(len(context_lens), kept)
        self._num_tokens += sum(context_lens)
        self._area += self._num_places * max(context_lens)


def simulated(asked: argparse.Namespace) -> Runner:
    def run(mode: str, arrivals: list[Arrival]) -> Outcome:
        rectangles = Rectangles(mode)

        def watch(scheduler: Scheduler, step: Step, step_s: float) -> None:
            if all(advance.start == 0 for advance in step.advances):  # nobody ran before
                rectangles.begin_batch()
            rectangles.add([advance.end for advance in step.advances if advance.has_sample])

        config = config_of(mode, asked)
        simulation = Simulation(config, num_blocks(config), arrivals, watch)
        simulation.run()
        return simulation.now_s, simulation.served, rectangles.efficiency_frac

    return run


def measured(asked: argparse.Namespace) -> Runner:
    engines: dict[str, Engine] = {}

    def run(mode: str, arrivals: list[Arrival]) -> Outcome:
        if mode not in engines:
            engines[mode] = Engine.open(asked.model, config_of(mode, asked))
            engines[mode].warm_up()
        return serve(engines[mode], Rectangles(mode), arrivals)

    return run


def serve(engine: Engine, rectangles: Rectangles, arrivals: list[Arrival]) -> Outcome:
    """Requests are added as the clock, which stands still while nothing is computed or waited for, passes them."""
    now_s, coming = 0.0, arrivals[::-1]
    by_id = {arrival.request.request_id: arrival for arrival in arrivals}
    times_s: dict[str, list[float]] = {name: [] for name in by_id}
    while coming or engine.has_unfinished:
        if engine.stats().num_running == 0:
            rectangles.begin_batch()
        if not engine.has_unfinished:
            now_s = max(now_s, coming[-1].request.arrival_s)
        while coming and coming[-1].request.arrival_s <= now_s:
            arrival = coming.pop()
            params = SamplingParams(max_tokens=arrival.num_new, ignore_eos=True)
            engine.add(arrival.request.prompt_ids, params, arrival.request.request_id)
        num_steps, computing_s, waiting_s = engine.stats().steps, time.process_time(), time.monotonic()
        names = [output.request_id for output in engine.step()]
        has_computed = engine.stats().steps > num_steps
        now_s += time.process_time() - computing_s if has_computed else time.monotonic() - waiting_s
        for name in names:
            times_s[name].append(now_s - by_id[name].request.arrival_s)
        rectangles.add([len(by_id[name].request.prompt_ids) + len(times_s[name]) - 1 for name in names])
    for name in by_id:
        engine.take_output(name)
    served = [Served(by_id[name], tuple(own)) for name, own in times_s.items()]
    return now_s, served, rectangles.efficiency_frac


def config_of(mode: str, asked: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        batching=mode,
        static_wait_s=asked.static_wait_s,
        max_num_seqs=asked.max_num_seqs,
        max_model_len=asked.max_model_len,
        num_threads=asked.threads,
        prefix_cache=False,
    )


def num_blocks(config: EngineConfig) -> int:
    """Room for every sequence at its longest: no mode is held up by memory."""
    return config.max_num_seqs * -(-(config.max_model_len or 1) // config.block_size)


def row(mode: str, outcome: Outcome) -> str:
    took_s, served, efficiency = outcome
    gaps_s = np.concatenate([np.diff(one.token_times_s) for one in served])
    columns = ([one.first_token_s for one in served], gaps_s, [one.latency_s for one in served])
    cells = ["{:.2f} / {:.2f}".format(*np.percentile(times_s, [50, 99])) for times_s in columns]
    num_new = sum(one.arrival.num_new for one in served)
    return f"| {mode} | {num_new / took_s:.1f} | {' | '.join(cells)} | {efficiency:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--num-requests", type=int, default=200)
    parser.add_argument("--scale", type=float, default=0.25, help="of lengths")
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--static-wait-s", type=float, default=1.0)
    parser.add_argument("--model", type=Path, help="run it, instead of a simulated clock")
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    arrivals = read_trace(asked.trace, asked.num_requests, asked.scale, asked.max_model_len)
    run = simulated(asked) if asked.model is None else measured(asked)
    capacity_s, _, _ = run("continuous", at_load(arrivals, 0.0, 0.0))
    print(f"{describe(arrivals)}; {capacity_s / asked.load:.0f} s at load {asked.load}\n")
    print("| batching | tok/s | first token, s (P50 / P99) | gap, s | last token, s | padding efficiency |")
    print("|---|---:|---|---|---|---:|")
    for mode in BATCHING_MODES:
        print(row(mode, run(mode, at_load(arrivals, capacity_s, asked.load))), flush=True)


if __name__ == "__main__":
    main()
