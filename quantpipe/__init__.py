"""quantpipe: from one declarative recipe to a released, quantized, served model, or a refusal with the reason."""

__version__ = "0.1.0"
