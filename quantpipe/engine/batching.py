"""When waiting sequences may join those that run. Knows counts and times; no blocks.

``continuous`` is how an engine should run: whoever fits joins at any step. The others exist to be compared with it:
``dynamic`` forms a batch of what waits whenever the last one has ended, and ``static`` also waits until the batch is
full or nothing has come for a while. Both leave the places of sequences that ended empty until the whole batch has.
"""

BATCHING_MODES = ("continuous", "dynamic", "static")


class Batching:
    """How many may join now. A batch is joined over several steps where its prompts exceed one step's tokens."""

    def __init__(self, mode: str, max_num_seqs: int, static_wait_s: float) -> None:
        self._mode = mode
        self._max_num_seqs = max_num_seqs
        self._static_wait_s = static_wait_s
        self._latest_arrival_s = float("-inf")
        self._num_places = 0

    def arrived(self, arrival_s: float) -> None:
        self._latest_arrival_s = max(self._latest_arrival_s, arrival_s)

    def num_places(self, num_running: int, num_waiting: int, now_s: float) -> int:
        """How many of those waiting may join, as far as the mode is concerned."""
        if self._mode == "continuous":
            return num_waiting
        if num_running == 0:
            self._num_places = 0 if self.wait_s(num_waiting, now_s) > 0 else min(num_waiting, self._max_num_seqs)
        return self._num_places

    def wait_s(self, num_waiting: int, now_s: float) -> float:
        """How long, if nothing runs and nothing more comes, until a batch is formed."""
        if self._mode != "static" or num_waiting == 0 or num_waiting >= self._max_num_seqs:
            return 0.0
        return max(0.0, self._latest_arrival_s + self._static_wait_s - now_s)

    def joined(self) -> None:
        self._num_places -= 1

    def close(self) -> None:
        """The batch is as full as it can be."""
        self._num_places = 0
