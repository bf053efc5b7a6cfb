"""The line of a request that was followed."""

import io
import json
import time
from collections.abc import Callable
from typing import Any

from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.shadow.options import ShadowOptions


def test_line_has_figures_of_both_and_no_text(
    start_server: Callable[..., Any], make_engine: Callable[..., Any], logged: Callable[[str], io.StringIO]
) -> None:
    stream = logged("json")
    options = FrontOptions(shadow=ShadowOptions())
    server = start_server(make_engine(), options=options, second=make_engine())
    headers = {"X-Request-Id": "mine"}
    body = {"model": "echo", "prompt": "SECRET", "temperature": 0, "max_tokens": 4}
    server.http.post("/v1/completions", json=body, headers=headers)
    deadline = time.monotonic() + 5
    while stream.getvalue().count("\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.stop()
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    (line,) = [entry for entry in entries if entry["message"] == "shadow"]
    assert (line["request_id"], line["outcome"], line["error"]) == ("mine", "compared", None)
    assert (line["equal_texts"], line["num_choices"], line["first_differences"]) == (1, 1, [])
    assert (line["completion_tokens"], line["finish_reasons"]) == ([4, 4], ["length/length"])
    assert len(line["ttft_s"]) == len(line["tpot_s"]) == 2
    assert "SECR" not in stream.getvalue()
