"""The OpenAI-compatible HTTP server over the engine. Knows tokens and text, not tensors."""
