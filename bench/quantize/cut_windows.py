"""A text file as token ids, once: both sides of a comparison, and the judge, read the same file of them.

The whole text is one stream, tokenized without special tokens by the model's own tokenizer, and cut into consecutive
windows that do not overlap; the first ``num_windows`` are kept.
"""

import argparse
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--num-windows", type=int, required=True)
    parser.add_argument("--window-tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = args.text.read_text(encoding="utf-8")
    token_ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
    needed = args.num_windows * args.window_tokens
    if len(token_ids) < needed:
        raise SystemExit(f"{args.text}: {len(token_ids):,} tokens, {needed:,} are needed; give more text")
    partial = args.out.with_suffix(".partial.npy")
    np.save(partial, token_ids[:needed].reshape(args.num_windows, args.window_tokens))
    partial.replace(args.out)


if __name__ == "__main__":
    main()
