"""A coverage in words: ``coverage.md`` in the run's folder, and a few sentences for the terminal."""

from collections.abc import Iterator, Sequence
from statistics import median

from quantpipe.calibrate.coverage.coverage_plots import BEYOND_PLOT, SATURATION_PLOT, TEXT_PLOT
from quantpipe.calibration.views.coverage import (
    MOST_SHOWN,
    Coverage,
    Share,
    seen_sentence,
    truncation_sentence,
    vocabulary_sentence,
)
from quantpipe.gate.report import figure, inline, markdown_table
from quantpipe.quantize.activation_coverage import ActivationCoverage, InputCoverage
from quantpipe.quantize.channel_ranges import BeyondRange
from quantpipe.wording import count_of

# A statistic that the second half of the sequences changes by more than this still moves.
MOVING_FRAC = 0.05
WORST_SHOWN = 10
DOMAINS_SUMMED_UP = 4


def render_markdown(text: Coverage, activations: ActivationCoverage | None) -> str:
    """The whole report, with the plots beside it."""
    parts = [f"# What {inline(text.name)} covers", *_text_parts(text)]
    if activations is not None:
        parts += _activation_parts(activations)
    return "\n\n".join(part for part in parts if part) + "\n"


def text_summary(text: Coverage) -> Iterator[str]:
    """What a reader of the terminal must know of what is in a set."""
    yield vocabulary_sentence(text)
    if text.num_truncated:
        yield truncation_sentence(text)
    for seen in text.held_out[:DOMAINS_SUMMED_UP]:
        yield f"held-out {seen.name}: {seen_sentence(seen)}"
    yield from _left_out(len(text.held_out))


def activation_summary(activations: ActivationCoverage) -> Iterator[str]:
    """What a reader of the terminal must know of what a set does in a model."""
    for index in range(len(activations.domains[:DOMAINS_SUMMED_UP])):
        yield beyond_sentence(activations, index)
    yield from _left_out(len(activations.domains))
    yield saturation_sentence(activations)
    yield from _unreached(activations)


def beyond_sentence(coverage: ActivationCoverage, index: int) -> str:
    """How much of the held-out domain of that number exceeds what calibration saw, and where most."""
    worst = _worst(coverage, index)
    name = inline(coverage.domains[index])
    return (
        f"held-out {name}: {_percent(coverage.beyond_frac(index))} of the values that linears read are beyond the "
        f"calibrated range of their channel, most at {_place(worst)} "
        f"({_percent(_share(worst.held_out[index]))}); were it drawn like the calibration set, about "
        f"{_percent(coverage.expected_frac(index))} would be"
    )


def saturation_sentence(coverage: ActivationCoverage) -> str:
    """Whether more sequences would change the statistics."""
    before = _before_last(coverage)
    if before is None:
        return "saturation: one sequence alone tells nothing of whether statistics still move"
    changes = {id(each): each.curve[before].hessian_change for each in coverage.inputs}
    moving = [each for each in coverage.inputs if changes[id(each)] > MOVING_FRAC]
    worst = max(coverage.inputs, key=lambda each: changes[id(each)])
    first, last = (coverage.inputs[0].curve[i].num_sequences for i in (before, -1))
    return (
        f"saturation: from {first} to {last} sequences the Hessian's diagonal changes by "
        f"{_percent(median(changes.values()))} (median), most at {_place(worst)} ({_percent(changes[id(worst)])}); "
        f"{len(moving)} of {len(changes)} inputs still move by more than {_percent(MOVING_FRAC)}"
    )


def _text_parts(text: Coverage) -> Iterator[str]:
    yield f"{text.num_tokens:,} tokens of {count_of(text.num_documents, 'documents')}."
    yield f"![Tokens by domain, language and length]({TEXT_PLOT})"
    if any(not each.name.isascii() for each in text.domains):
        yield "A name that the plots have no letters for is a number there: its row in the tables."
    for title, shares in (
        ("domain", text.domains),
        ("language", text.languages),
        ("tokens in a document", text.lengths),
    ):
        yield _share_table(title, shares)
    yield f"- {vocabulary_sentence(text)}\n- {truncation_sentence(text)}"
    if text.held_out:
        yield "## Held-out vocabulary"
        yield markdown_table(
            ("held out", "tokens", "tokens with a calibrated id", "different ids", "of these calibrated"),
            [
                (each.name, f"{each.num_tokens:,}", _percent(each.num_tokens_seen / max(each.num_tokens, 1)),
                 f"{each.num_ids:,}", _percent(each.num_ids_seen / max(each.num_ids, 1)))
                for each in text.held_out
            ],
            right={1, 2, 3, 4},
        )  # fmt: skip
    else:
        yield "No held-out text was there to compare with: give `evaluate.divergence`, or a `holdout` in the set."


def _share_table(title: str, shares: Sequence[Share]) -> str:
    total = max(sum(share.num_tokens for share in shares), 1)
    rows = [
        (share.name, f"{share.num_tokens:,}", _percent(share.num_tokens / total), f"{share.num_documents:,}")
        for share in shares[:MOST_SHOWN]
    ]
    table = markdown_table((title, "tokens", "share", "documents"), rows, right={1, 2, 3})
    num_left = len(shares) - MOST_SHOWN
    return f"{table}\n\n{num_left} more are not shown." if num_left > 0 else table


def _activation_parts(coverage: ActivationCoverage) -> Iterator[str]:
    yield "## Activations"
    yield (
        "Of the full-precision model, before any transform: what the linears of each block read. A held-out value is "
        "beyond the range where it is larger than every value of its channel in calibration. *Expected* is the share "
        "were held-out text drawn like the calibration set: one in as many tokens as were calibrated on, and one more."
    )
    if coverage.domains:
        yield f"![Held-out values beyond the calibrated range, by block; dashed: expected]({BEYOND_PLOT})"
        yield _domain_table(coverage)
        yield f"The {WORST_SHOWN} inputs with most:"
        yield _worst_table(coverage)
    yield "## Saturation"
    yield (
        "How far the statistics of the first sequences are from those of all, relatively. The largest magnitudes creep "
        "up with any more text; the Hessian's diagonal settles."
    )
    yield f"![Distance of the statistics from those of all sequences]({SATURATION_PLOT})"
    yield _saturation_table(coverage)
    yield "\n".join(f"- {line}" for line in (saturation_sentence(coverage), *_unreached(coverage)))


def _domain_table(coverage: ActivationCoverage) -> str:
    rows = []
    for index, domain in enumerate(coverage.domains):
        worst = _worst(coverage, index)
        largest = max(each.held_out[index].largest_ratio for each in coverage.inputs)
        shares = (coverage.beyond_frac(index), coverage.expected_frac(index), _share(worst.held_out[index]))
        rows.append((domain, *map(_percent, shares), _place(worst), figure(largest)))
    headings = ("held out", "beyond the range", "expected", "at most", "at", "largest value / its channel's maximum")
    return markdown_table(headings, rows, right={1, 2, 3, 5})


def _worst_table(coverage: ActivationCoverage) -> str:
    pairs = [(each, index) for each in coverage.inputs for index in range(len(coverage.domains))]
    worst = sorted(pairs, key=lambda pair: -_share(pair[0].held_out[pair[1]]))[:WORST_SHOWN]
    rows = [
        (
            _place(each),
            coverage.domains[index],
            _percent(_share(each.held_out[index])),
            figure(each.held_out[index].largest_ratio),
            f"{each.num_tokens:,}",
        )
        for each, index in worst
    ]
    headings = ("input of", "held out", "beyond the range", "largest ratio", "calibration tokens")
    return markdown_table(headings, rows, right={2, 3, 4})


def _saturation_table(coverage: ActivationCoverage) -> str:
    rows = []
    for index, point in enumerate(coverage.inputs[0].curve):
        hessian = [each.curve[index].hessian_change for each in coverage.inputs]
        absmax = [each.curve[index].absmax_change for each in coverage.inputs]
        rows.append((point.num_sequences, *map(_percent, (median(hessian), max(hessian), median(absmax), max(absmax)))))
    headings = ("sequences", "Hessian's diagonal, median", "worst", "largest magnitudes, median", "worst")
    return markdown_table(headings, rows, right=set(range(5)))


def _left_out(num_domains: int) -> Iterator[str]:
    if num_domains > DOMAINS_SUMMED_UP:
        yield f"{num_domains - DOMAINS_SUMMED_UP} more held-out domains are not listed here"


def _unreached(coverage: ActivationCoverage) -> Iterator[str]:
    if coverage.unreached:
        yield (
            f"{len(coverage.unreached)} linears of experts saw no calibration token, such as {coverage.unreached[0]}; "
            "more tokens, or others, may reach them"
        )


def _before_last(coverage: ActivationCoverage) -> int | None:
    """The index of the curves' last point but one; None where there is one only."""
    num_points = len(coverage.inputs[0].curve)
    return num_points - 2 if num_points > 1 else None


def _place(each: InputCoverage) -> str:
    return f"block {each.block} {each.linears[0]}"


def _worst(coverage: ActivationCoverage, index: int) -> InputCoverage:
    return max(coverage.inputs, key=lambda each: _share(each.held_out[index]))


def _share(part: BeyondRange) -> float:
    return part.num_beyond / max(part.num_values, 1)


def _percent(value: float) -> str:
    return f"{figure(100 * value)} %"
