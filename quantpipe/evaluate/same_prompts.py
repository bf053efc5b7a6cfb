"""Whether an artifact turns text and conversations into the tokens that its base model does. Asks no model anything.

Weights that are right are of no use behind another tokenizer or chat template, and neither shows in figures that are
measured on token ids.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RequestError
from quantpipe.evaluate.eval_texts import eval_texts
from quantpipe.evaluate.suite import Suite
from quantpipe.gate.judge import Measurement
from quantpipe.gate.metrics import EXACT_CONFIDENCE
from quantpipe.serve.chat import ChatTemplate

Message = Mapping[str, str]
# Asked of every model, whatever else is: scripts, white space, digits, code and marks that tokenizers differ in.
PROBE_TEXTS = (
    "The quick brown fox jumps over the lazy dog; it's 12,345.67 metres away, isn't it?",
    "  def f(x):\n\treturn {'a': [x ** 2, None]}  # two  spaces\r\n",
    "Größe, façade, naïve, señor: Zürich-Süd 80 %\nПривет, как дела? 你好，世界。こんにちは مرحبا बालक",
    "https://example.org/a_b?c=1&d=%20 <b>bold</b> €5 \U0001f642 e\u0301",
)
PROBE_CONVERSATIONS: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "What is 2 + 2?"},),
    ({"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "The capital of France?"}),
    (
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello, how can I help?"},
        {"role": "user", "content": "  Where is my parcel?\n"},
    ),
)


def asked_texts(suite: Suite | None, windows: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
    """What the models are asked, as text: the questions and answers of the suite's items, and the windows."""
    texts = (each.text for each in eval_texts(suite, None))
    return list(dict.fromkeys([*texts, *(tokenizer.decode(window) for window in windows)]))


def prompt_mismatches(base: Path, candidate: Path, texts: Sequence[str]) -> Measurement:
    """How many of ``texts``, and of some that are always asked, the two model folders read as different tokens.

    Conversations are rendered with each folder's chat template; two that refuse one, or have none, agree. Raises
    ArtifactError where a folder has no tokenizer or chat template that can be read.
    """
    ours, theirs = Tokenizer.open(base), Tokenizer.open(candidate)
    asked = (*PROBE_TEXTS, *texts)
    num_texts = sum(ours.encode(text, True) != theirs.encode(text, True) for text in asked)
    templates = _template(ours), _template(theirs)
    num_chats = sum(
        _read(templates[0], ours, each) != _read(templates[1], theirs, each) for each in PROBE_CONVERSATIONS
    )
    num_found = num_texts + num_chats
    return Measurement(
        name="prompt_mismatches",
        value=num_found,
        low=num_found,
        high=num_found,
        confidence=EXACT_CONFIDENCE,
        num_samples=len(asked) + len(PROBE_CONVERSATIONS),
        unit="count",
        detail=f"tokenizer: {num_texts} of {len(asked)} texts; "
        f"chat template: {num_chats} of {len(PROBE_CONVERSATIONS)} conversations",
    )


def _template(tokenizer: Tokenizer) -> ChatTemplate | None:
    source = tokenizer.chat_template
    return None if source is None else ChatTemplate.compile(source, tokenizer.special_tokens)


def _read(template: ChatTemplate | None, tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int] | None:
    if template is None:
        return None
    try:
        return tokenizer.encode(template.render(messages))
    except RequestError:
        return None
