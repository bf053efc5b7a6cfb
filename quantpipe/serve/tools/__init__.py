"""Tools that a model may call: how clients describe them, and how each family of models writes its calls."""
