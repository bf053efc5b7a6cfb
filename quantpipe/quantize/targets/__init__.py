"""Which linears are quantized, and in which scheme: found, checked, and chosen under a budget."""
