"""quantpipe: from one declarative recipe to a released, quantized, served model, or a refusal with the reason."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantpipe.completion import Completion as Completion
    from quantpipe.completion import CompletionOutput as CompletionOutput
    from quantpipe.engine.constraint import Grammar as Grammar
    from quantpipe.engine.sampling_params import SamplingParams as SamplingParams
    from quantpipe.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "CompletionOutput", "Grammar", "SamplingParams"]

# Imported when first asked for: the command line must not wait for torch.
_HOMES = {
    "LLM": "quantpipe.llm",
    "Completion": "quantpipe.completion",
    "CompletionOutput": "quantpipe.completion",
    "Grammar": "quantpipe.engine.constraint",
    "SamplingParams": "quantpipe.engine.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'quantpipe' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
