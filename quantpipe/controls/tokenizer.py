"""A tokenizer that lost its later half: what an export does that stops early."""

import json
from typing import Any

from quantpipe.controls.control import Damage
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.digests import read_json

TOKENIZER_NAME = "tokenizer.json"


def tokenizer_cut(artifact: Artifact) -> Damage | str:
    """Half of the merges are gone; of a tokenizer without merges, half of the pieces of its vocabulary."""
    content = read_json(artifact.folder / TOKENIZER_NAME)
    model: dict[str, Any] = content.get("model", {})
    merges, vocab = model.get("merges"), model.get("vocab")
    if merges:
        model["merges"] = merges[: len(merges) // 2]
    elif isinstance(vocab, list):
        model["vocab"] = vocab[: len(vocab) // 2]
    elif isinstance(vocab, dict) and len(vocab) > 1:
        model["vocab"] = {piece: number for piece, number in vocab.items() if number < len(vocab) // 2}
    else:
        return "no merges and no vocabulary to cut"
    return Damage(files={TOKENIZER_NAME: json.dumps(content, ensure_ascii=False).encode()})
