"""From what a run measured to its verdict: results, stored and judged again, and what they can decide."""
