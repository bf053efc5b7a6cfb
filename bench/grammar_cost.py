"""What guided decoding costs, by kind of grammar: loading the vocabulary, compiling, a mask for each token.

    python bench/grammar_cost.py MODEL_FOLDER

Processor time of one thread. For each grammar: compiling it with its first mask; over ``--num-tokens`` random tokens
that it allows, the median and the largest time of a mask, applied to a row of logits; copying a matcher, as guesses do.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from quantpipe.engine.constraint import Grammar
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RequestError
from quantpipe.guided.compiler import GrammarCompiler


def json_schema(schema: object) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def many_keys(num: int) -> Grammar:
    kinds = [{"type": "string", "pattern": "^[a-z]{3,20}$"}, {"type": "integer", "minimum": 0}, {"type": "null"}]
    names = [f"key_{number}" for number in range(num)]
    return json_schema({"type": "object", "properties": {name: {"anyOf": kinds} for name in names}, "required": names})


GRAMMARS: dict[str, Grammar] = {
    "any JSON object": json_schema({"type": "object"}),
    "schema of 3 keys": many_keys(3),
    "schema of 120 keys": many_keys(120),
    "choice of 1,000 texts": Grammar(
        "lark", "start: " + " | ".join(json.dumps(f"text number {n} of many") for n in range(1000))
    ),
    "e-mail by regex": Grammar("regex", r"[a-z0-9.]+@[a-z0-9]+\.(com|org)"),
    "regex (.*a.*){30}b": Grammar("regex", "(.*a.*){30}b"),
    "regex a{1000000}": Grammar("regex", "a{1000000}"),
    "regex (a{1000}){1000}": Grammar("regex", "(a{1000}){1000}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-tokens", type=int, default=200)
    asked = parser.parse_args()
    tokenizer = Tokenizer.open(asked.folder)
    compiler = GrammarCompiler(tokenizer)
    compiler_s = seconds_of(compiler.load)
    print(f"vocabulary of {tokenizer.vocab_size:,}: {compiler_s * 1e3:.0f} ms, once")
    print("| grammar | compiled, ms | mask, median us | mask, largest us | copy, us |\n|---|---:|---:|---:|---:|")
    for name, grammar in GRAMMARS.items():
        print(f"| {name} | {measured(compiler, grammar, tokenizer.vocab_size, asked.num_tokens)} |")


def measured(compiler: GrammarCompiler, grammar: Grammar, vocab_size: int, num_tokens: int) -> str:
    started_s = time.thread_time()
    try:
        first = compiler.compile(grammar)
    except RequestError as error:
        return f"{(time.thread_time() - started_s) * 1e3:.1f} | refused: {str(error)[:60]} | |"
    compiled_s = time.thread_time() - started_s
    rng, logits_V = np.random.default_rng(0), np.zeros(vocab_size, dtype=np.float32)
    masks_s: list[float] = []
    matcher = first.copy()
    while len(masks_s) < num_tokens:
        started_s = time.thread_time()
        allowed_V = matcher.allowed_V(vocab_size)
        row_V = logits_V.copy()
        row_V[~allowed_V] = -np.inf
        masks_s.append(time.thread_time() - started_s)
        ids = np.flatnonzero(allowed_V)
        if matcher.failure is not None or len(ids) < 2:
            matcher = first.copy()  # the end, or a place with one way on
            matcher.allowed_V(vocab_size)
            continue
        matcher.append(int(rng.choice(ids)))
    copy_s = min(seconds_of(matcher.copy) for _ in range(100))
    return f"{compiled_s * 1e3:.1f} | {np.median(masks_s) * 1e6:.0f} | {max(masks_s) * 1e6:.0f} | {copy_s * 1e6:.0f}"


def seconds_of(call: object) -> float:
    started_s = time.thread_time()
    call()  # type: ignore[operator]
    return time.thread_time() - started_s


if __name__ == "__main__":
    main()
