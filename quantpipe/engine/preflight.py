"""What an engine would refuse at its start, asked before hours of work: loads no weight, takes no memory."""

from quantpipe.backends import BACKENDS
from quantpipe.backends.protocol import Backend
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.kv_cache import resolve_attention_window, resolve_max_model_len, resolve_num_kv_blocks
from quantpipe.errors import RecipeError, suggest
from quantpipe.models.description import DecoderDescription


def backend_of(config: EngineConfig) -> Backend:
    """The backend that is asked for. RecipeError where there is none of that name."""
    if config.backend not in BACKENDS:
        raise RecipeError(f"engine.backend: unknown '{config.backend}'{suggest(config.backend, BACKENDS)}")
    return BACKENDS[config.backend]()


def check_machine(config: EngineConfig) -> None:
    """Raise RecipeError where this machine lacks what the backend needs."""
    backend_of(config).check()


def check_settings(config: EngineConfig, description: DecoderDescription) -> None:
    """Raise RecipeError where the backend has no kernels for this decoder, or settings do not suit it.

    How many bytes there are is known only to an engine that was opened.
    """
    backend_of(config).check(description)
    max_model_len = resolve_max_model_len(config, description.max_position_embeddings)
    limit = description.max_position_embeddings
    window = resolve_attention_window(config, description.windows, limit, supports_windows=True)
    if config.num_kv_blocks is not None:
        resolve_num_kv_blocks(config, max_model_len, window, bytes_per_block=1)
