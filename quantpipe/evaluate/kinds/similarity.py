"""``similarity``: how much the answer has in common with the closest reference, by a metric of sacrebleu."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from quantpipe.evaluate.kinds.kind import Item, Kind, Response, Scored, TextKeys, texts_of, written


class SimilarityKeys(TextKeys):
    """A task of the kind `similarity`; the target is a reference, or a list of them."""

    kind: Literal["similarity"]
    """`similarity`."""
    metric: Literal["chrf", "bleu"] = "chrf"
    """`chrf`: common runs of up to six characters, for every language; `bleu`: common runs of up to four words, counted
    in each answer alone."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Score from 0 to 1 from which an answer is right. Absent: the score itself counts."""

    def shot_answer(self, target: Any) -> str:
        return texts_of(target)[0]


@dataclass(frozen=True)
class SimilarityScorer:
    """Compares each answer with its references; the prediction is the answer."""

    keys: SimilarityKeys
    metric: Any

    def check(self, item: Item) -> None:
        texts_of(item.target)

    def score(self, item: Item, response: Response) -> Scored:
        text = " ".join(written(response).split())
        value = self.metric.sentence_score(text, list(texts_of(item.target))).score / 100
        value = min(max(value, 0.0), 1.0)  # of sums of rounded shares
        threshold = self.keys.threshold
        return Scored(value if threshold is None else float(value >= threshold), text)


def _open(keys: SimilarityKeys, folder: Path, place: Callable[[str], str]) -> SimilarityScorer:
    return SimilarityScorer(keys, CHRF() if keys.metric == "chrf" else BLEU(effective_order=True))


KIND = Kind(SimilarityKeys, "text", "how much the answer has in common with a reference (sacrebleu)", _open)
