"""What rounds a weight: round to nearest and GPTQ, and the search of scales that both use. Knows no model."""
