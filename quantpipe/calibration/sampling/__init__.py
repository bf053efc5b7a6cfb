"""Which rows fill the budget: first pass and pools, strata and quotas, then blocks, and what became of each source."""
