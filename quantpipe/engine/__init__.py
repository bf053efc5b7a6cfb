"""The serving engine: paged KV cache, continuous batching, sampling. Imports no web, config-file or hub library."""
