"""Which blocks hold the keys and values of which tokens, so that a prompt need not compute what another one did.

A block is found by a chain of hashes: that of its tokens and of everything before them. A hash only finds candidates:
a hit is confirmed by comparing the tokens and, by identity, the entry before, so a collision costs time and no more.

Knows tokens and block ids; no tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantpipe.engine.block_pool import BlockPool


class PrefixNamespace(NamedTuple):
    """What has to be equal, beside the tokens, for keys and values to be shared.

    ``salt`` keeps tenants apart: whoever does not know it cannot learn by timing which prompts were sent under it.
    """

    salt: str = ""
    kv_dtype: str = "auto"
    artifact_digest: str = ""
    attention: str = "full"


@dataclass(eq=False, slots=True)
class PrefixEntry:
    """One full block: its tokens, and the entry before it or, for the first, the namespace. Compared by identity."""

    parent: "PrefixEntry | PrefixNamespace"
    token_ids: tuple[int, ...]
    hash: int
    block: int


# The hash of a block from that of its parent and its own tokens.
BlockHash = Callable[[int, tuple[int, ...]], int]


def chain_hash(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    """Not predictable from outside: the first parent is a namespace, whose strings Python hashes with a secret."""
    return hash((parent_hash, token_ids))


class PrefixCache:
    """Full blocks by content. Lives as long as the pool whose blocks it describes.

    An equal block is registered once: a sequence that computed it again is given the one already there. So whoever
    holds a registered block holds every one before it, and none of them is evicted under its successors; but where a
    window has passed some. Whatever followed one that was evicted is not found any more, and evicted in its turn.
    """

    def __init__(self, pool: BlockPool, block_size: int, block_hash: BlockHash = chain_hash) -> None:
        self._pool = pool
        self._block_size = block_size
        self._block_hash = block_hash
        self._by_hash: dict[int, list[PrefixEntry]] = {}
        self._by_block: dict[int, PrefixEntry] = {}
        pool.on_evict = self._evict
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def match(self, token_ids: Sequence[int], namespace: PrefixNamespace, max_tokens: int | None = None) -> list[int]:
        """The blocks of the longest known prefix, in order; the caller takes its references by ``BlockPool.share``.

        At least one token is always left to compute, as its logits are wanted; ``max_tokens`` may leave more.
        """
        most = len(token_ids) - 1 if max_tokens is None else min(max_tokens, len(token_ids) - 1)
        blocks: list[int] = []
        parent: PrefixEntry | PrefixNamespace = namespace
        for index in range(most // self._block_size):
            tokens = self._tokens_of(token_ids, index)
            entry = self._find(parent, tokens, self._hash(parent, tokens))
            if entry is None:
                break
            blocks.append(entry.block)
            parent = entry
        return blocks

    def record(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        """Count a prompt that was looked up and admitted."""
        self.num_query_tokens += num_query_tokens
        self.num_hit_tokens += num_hit_tokens

    def register(
        self, seq_blocks: list[int], token_ids: Sequence[int], num_computed: int, namespace: PrefixNamespace
    ) -> None:
        """Make the full computed blocks of a sequence known. The work depends on how many are new only.

        Where an equal block is known already, ``seq_blocks`` changes: it takes that one and drops its own.
        """
        num_full = num_computed // self._block_size
        first = num_full
        while first > 0 and seq_blocks[first - 1] not in self._by_block:
            first -= 1
        parent = self._by_block[seq_blocks[first - 1]] if first else namespace
        for index in range(first, num_full):
            parent = self._enter(parent, self._tokens_of(token_ids, index), seq_blocks, index)

    def forget(self, blocks: Sequence[int]) -> None:
        """These blocks are not to be found again, nor what follows them: their content proved unusable."""
        for block in blocks:
            if block in self._by_block:
                self._remove(block)
                self._pool.discard(block)

    def clear(self) -> None:
        """Forget everything, counters included. What sequences hold stays theirs."""
        self.forget(list(self._by_block))
        self.num_query_tokens = self.num_hit_tokens = self.num_evictions = 0

    def _enter(
        self, parent: PrefixEntry | PrefixNamespace, token_ids: tuple[int, ...], seq_blocks: list[int], index: int
    ) -> PrefixEntry:
        block = seq_blocks[index]
        own_hash = self._hash(parent, token_ids)
        known = self._find(parent, token_ids, own_hash)
        if known is not None:
            self._pool.share([known.block])
            self._pool.release([block])
            seq_blocks[index] = known.block
            return known
        entry = PrefixEntry(parent, token_ids, own_hash, block)
        self._by_hash.setdefault(own_hash, []).append(entry)
        self._by_block[block] = entry
        self._pool.keep(block)
        return entry

    def _find(
        self, parent: PrefixEntry | PrefixNamespace, token_ids: tuple[int, ...], own_hash: int
    ) -> PrefixEntry | None:
        for entry in self._by_hash.get(own_hash, ()):
            # An evicted parent is never met again, even if an equal entry took its place: entries are not values.
            if entry.token_ids == token_ids and entry.parent == parent:
                return entry
        return None

    def _hash(self, parent: PrefixEntry | PrefixNamespace, token_ids: tuple[int, ...]) -> int:
        parent_hash = parent.hash if isinstance(parent, PrefixEntry) else hash(parent)
        return self._block_hash(parent_hash, token_ids)

    def _tokens_of(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self._block_size : (index + 1) * self._block_size])

    def _evict(self, block: int) -> None:
        self._remove(block)
        self.num_evictions += 1

    def _remove(self, block: int) -> None:
        entry = self._by_block.pop(block)
        bucket = self._by_hash[entry.hash]
        bucket.remove(entry)
        if not bucket:
            del self._by_hash[entry.hash]
