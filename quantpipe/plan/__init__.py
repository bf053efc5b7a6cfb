"""The sums before any work: memory, time, what fits. Of a config.json alone; loads no weights, imports no torch."""
