"""An engine that answers without computing, as the process behind a front: what is left is the cost of serving.

Started by ``bench/servers/null_front.py``, with its end of the connection as the only argument.
"""

import itertools
import os
import socket
import sys
from collections.abc import Sequence

from quantpipe.engine.request import FinishReason, SamplingParams, StepOutput
from quantpipe.engine.stats import EngineStats
from quantpipe.serve.engine_process.host import EngineHost
from quantpipe.serve.engine_process.messages import EngineFacts, Opened

MAX_MODEL_LEN = 4096
FIRST_ID, NUM_IDS = 1000, 500  # words, in most vocabularies


class NullEngine:
    """One token for every request in each step, until ``max_tokens``."""

    max_model_len = MAX_MODEL_LEN

    def __init__(self) -> None:
        self._left: dict[str, int] = {}
        self._ids = itertools.cycle(range(FIRST_ID, FIRST_ID + NUM_IDS))

    @property
    def has_unfinished(self) -> bool:
        return bool(self._left)

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None, **order: object
    ) -> str:
        assert request_id is not None, "the front names requests"
        self._left[request_id] = params.max_tokens
        return request_id

    def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def abort_sample(self, request_id: str, index: int) -> None:
        """There is one of each request."""

    def step(self) -> list[StepOutput]:
        outputs = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            reason = None if self._left[request_id] else FinishReason.LENGTH
            outputs.append(StepOutput(request_id, (next(self._ids),), (), reason))
            if reason is not None:
                del self._left[request_id]
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(len(self._left), 0, 0, 1, 1, 0, 0, 0, 0)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    host = EngineHost(connection, lambda: os._exit(0))
    host.listen()
    host.wait_for_opening()
    host.send(Opened(EngineFacts(MAX_MODEL_LEN, "null")))
    host.serve(NullEngine())


if __name__ == "__main__":
    main()
