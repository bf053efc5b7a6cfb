"""Which tokens of a sequence later ones can still see, and so which of its KV blocks are held. Knows counts only.

A layer that looks back over a window of w tokens needs no block behind it. Blocks hold every layer's keys and values,
so they can be let go where every layer has a window, be it the model's own or the engine's. With ``num_sinks`` the
first tokens stay visible besides (StreamingLLM, Xiao et al. 2023), and so do their blocks.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionWindow:
    """What the blocks of a sequence are needed for.

    ``asked`` is the window that the engine gives to every layer, None where each keeps its own. ``widest`` is the
    largest of any layer, None where one sees everything: then all blocks are held. ``reach`` is how far back a token
    can have any influence, through all layers, sinks apart. A step reads at most ``max_chunk`` tokens of a sequence.
    """

    block_size: int
    num_sinks: int = 0
    asked: int | None = None
    widest: int | None = None
    reach: int = 0
    max_chunk: int = 1

    @property
    def is_bounded(self) -> bool:
        """Whether blocks are ever let go."""
        return self.widest is not None

    @property
    def is_endless(self) -> bool:
        """Whether a sequence may grow without end, also beyond the positions that the model knows."""
        return self.asked is not None

    @property
    def num_sink_blocks(self) -> int:
        return self.num_blocks(self.num_sinks)

    @property
    def form(self) -> str:
        """What keys and values depend on besides the model: part of what prefixes are kept under."""
        return "full" if self.asked is None else f"sinks {self.num_sinks}, window {self.asked}"

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens, none let go."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int | None) -> int:
        """The most blocks that a sequence holds at a time until it has so many tokens; None: however many."""
        if self.widest is None:
            assert num_tokens is not None, "without windows nothing bounds a sequence but its length"
            return self.num_blocks(num_tokens)
        # A window and a chunk in a row, wherever they begin within a block.
        most = self.num_sink_blocks + self.num_blocks(self.widest + self.max_chunk - 2) + 1
        return most if num_tokens is None else min(most, self.num_blocks(num_tokens))

    def num_dropped(self, num_computed: int) -> int:
        """How many blocks behind the sink blocks no token from ``num_computed`` on can see."""
        if self.widest is None:
            return 0
        return max(0, (num_computed - self.widest + 1) // self.block_size - self.num_sink_blocks)

    def first_needed(self, position: int) -> int:
        """Where reading may begin, sinks apart, for all from ``position`` on to be as if everything had been read.

        That is the first token of a block. What is read right behind it is wrong, yet by then out of anyone's sight.
        """
        if self.widest is None:
            return 0
        first = max(0, position - self.reach) // self.block_size
        return first * self.block_size if first > self.num_sink_blocks else 0
