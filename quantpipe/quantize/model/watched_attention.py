"""Watching a model's attention: queries, keys and values as they are after rope, and the function applied to them.

A model must be opened with ``attn_implementation=watched_attention()``; it then computes what transformers' sdpa
attention computes, and shows each call to whoever is watching.

Shapes: S sequences, L tokens, H query heads, J KV heads, D head_dim.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

# Contains "sdpa", so that transformers asks a model whether it supports that.
WATCHED_ATTENTION = "quantpipe_sdpa"


@dataclass(frozen=True)
class AttentionCall:
    """One call of a model's attention: what rope gave out, and the function that the model applies to it."""

    module: nn.Module
    query_SHLD: Tensor
    key_SJLD: Tensor
    value_SJLD: Tensor
    mask: Tensor | None
    settings: dict[str, Any]

    def output(self, query_SHLD: Tensor, key_SJLD: Tensor, value_SJLD: Tensor) -> Tensor:
        """Attention output [S, L, H, D] of other queries, keys and values under this call's mask and scale."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attended_SLHD: Tensor = sdpa_attention_forward(
            self.module, query_SHLD, key_SJLD, value_SJLD, self.mask, **self.settings
        )[0]
        return attended_SLHD

    def first_sequence(self, num_tokens: int) -> "AttentionCall":
        """The first ``num_tokens`` of its first sequence, in float32 and in memory of their own."""
        mask = self.mask
        if mask is not None:
            mask = mask[:1, :, :num_tokens, :num_tokens].clone()
        query_SHLD, key_SJLD, value_SJLD = (
            x[:1, :, :num_tokens].to(torch.float32, copy=True)
            for x in (self.query_SHLD, self.key_SJLD, self.value_SJLD)
        )
        return replace(self, query_SHLD=query_SHLD, key_SJLD=key_SJLD, value_SJLD=value_SJLD, mask=mask)

    @property
    def is_real_SL(self) -> Tensor:
        """False for padding: every real token attends to itself."""
        num_sequences, _, num_tokens, _ = self.query_SHLD.shape
        if self.mask is None:
            return torch.ones(num_sequences, num_tokens, dtype=torch.bool)
        diagonal_SL = self.mask[:, 0].diagonal(dim1=-2, dim2=-1).expand(num_sequences, num_tokens)
        return diagonal_SL if diagonal_SL.dtype == torch.bool else diagonal_SL > torch.finfo(diagonal_SL.dtype).min / 2


Watcher = Callable[[AttentionCall], None]
_watcher: ContextVar[Watcher | None] = ContextVar("attention_watcher", default=None)


def watched_attention() -> str:
    """The name to open a model with; makes it known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(WATCHED_ATTENTION, _attend)
    AttentionMaskInterface.register(WATCHED_ATTENTION, sdpa_mask)
    return WATCHED_ATTENTION


@contextmanager
def watching_attention(watcher: Watcher) -> Iterator[None]:
    """Within it, ``watcher`` is shown every attention call of models opened with ``watched_attention``."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@contextmanager
def watching_while(condition: Callable[[], bool]) -> Iterator[None]:
    """Within it, whoever is watching is shown only the calls for which ``condition()`` holds."""
    watcher = _watcher.get()

    def show(call: AttentionCall) -> None:
        if watcher is not None and condition():
            watcher(call)

    with watching_attention(show):
        yield


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """transformers' signature of an attention function."""
    call = AttentionCall(module, query, key, value, attention_mask, settings)
    watcher = _watcher.get()
    if watcher is not None:
        watcher(call)
    return call.output(query, key, value), None
