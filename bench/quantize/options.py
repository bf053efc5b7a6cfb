"""Command line options that the scripts share."""

import argparse
from pathlib import Path

from quantize.rows import Machine, Tokens
from quantize.run_rows import Bench


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, the texts, where results go, how much text, and what the makers may use."""
    parser.add_argument("--model", type=Path, required=True, help="full-precision model folder")
    parser.add_argument("--calibration-text", type=Path, required=True, help="UTF-8 text file")
    parser.add_argument("--test-text", type=Path, required=True, help="UTF-8 text file to judge on")
    parser.add_argument("--out", type=Path, required=True, help="folder for results, logs and kept files")
    parser.add_argument("--peer-python", type=Path, help="python of an environment that holds llm-compressor")
    parser.add_argument("--peer-batch-size", type=int, default=1, help="windows that llm-compressor reads at once")
    parser.add_argument("--num-windows", type=int, default=Tokens.num_windows)
    parser.add_argument("--window-tokens", type=int, default=Tokens.window_tokens)
    parser.add_argument("--num-test-windows", type=int, default=Tokens.num_test_windows)
    parser.add_argument("--rounds", type=int, default=1, help="times each artifact is made; rows take turns")
    parser.add_argument("--threads", type=int, default=Machine.threads)
    parser.add_argument("--nice", type=int, default=Machine.nice)
    parser.add_argument("--not-judged", action="store_true", help="only time the making of the artifacts")
    parser.add_argument("--keep-artifacts", action="store_true")


def bench_of(args: argparse.Namespace) -> Bench:
    """What the options ask for."""
    return Bench(
        model=args.model.resolve(),
        calibration_text=args.calibration_text,
        test_text=args.test_text,
        out=args.out,
        peer_python=args.peer_python,
        tokens=Tokens(args.num_windows, args.window_tokens, args.num_test_windows),
        machine=Machine(args.threads, args.nice),
        peer_batch_size=args.peer_batch_size,
        keep_artifacts=args.keep_artifacts,
    )
