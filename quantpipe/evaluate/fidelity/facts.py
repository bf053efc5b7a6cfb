"""What a report says of held-out text beside the measurements that the gate looks at."""

from quantpipe.evaluate.divergence import DivergenceResult
from quantpipe.gate.report import figure


def divergence_facts(divergence: DivergenceResult) -> tuple[tuple[str, str], ...]:
    """Labels and sentences, in order."""
    facts = [
        ("perplexity", f"baseline {divergence.base_perplexity:.3f}, candidate {divergence.cand_perplexity:.3f}"),
        (
            "KL per token, nats",
            f"median {divergence.median_kl:.2g}, 99th percentile {divergence.p99_kl:.2g}, largest "
            f"{divergence.max_kl:.2g}",
        ),
    ]
    if divergence.top_k is not None:
        facts.append(("baseline", f"stored, {divergence.top_k} tokens of each position: every KL is a lower bound"))
    for worst in (each for each in divergence.measurements if each.name.startswith("worst_domain_kl")):
        facts.append(("worst domain", f"mean KL {figure(worst.value)} nats, {worst.detail}"))
    by_position = (f"{row.first}-{row.last}: {figure(row.mean_kl)}" for row in divergence.positions)
    facts.append(("mean KL by tokens before", ", ".join(by_position)))
    if divergence.slope is not None:
        slope, (low, high) = divergence.slope
        ends = f"{figure(low)} .. {figure(high)}"
        facts.append(("KL by length of text", f"{slope:+.2g} nats for each doubling of the text before ({ends})"))
    return tuple(facts)
