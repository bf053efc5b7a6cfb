"""A judge behind HTTP: what it is sent, what is kept, and that whatever goes wrong with it ends the run."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quantpipe.errors import DataError
from quantpipe.evaluate.kinds.judge import JudgeKeys, JudgeScorer
from quantpipe.evaluate.kinds.kind import Item
from quantpipe.evaluate.kinds.table import KINDS

ITEM = Item("i7", "a.csv:8", "p", fields={"text": "Hello?"})


class FakeJudge(ThreadingHTTPServer):
    """Replies what it is told to, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses: list[int] = []
        self.reply, self.delay_s, self.raw = "I give it 8 of 10.", 0.0, ""
        self.asked: list[tuple[dict[str, Any], str | None]] = []


class _Handler(BaseHTTPRequestHandler):
    server: FakeJudge

    def do_GET(self) -> None:
        self._send(200, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body, self.headers["Authorization"]))
        time.sleep(self.server.delay_s)
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        reply = {"choices": [{"message": {"role": "assistant", "content": self.server.reply}}]}
        self._send(status, self.server.raw or json.dumps(reply))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[FakeJudge]:
    server = FakeJudge()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTPIPE_CACHE", str(tmp_path / "cache"))


def keys_of(url: str, **changed: Any) -> JudgeKeys:
    settings = {
        "name": "t",
        "kind": "judge",
        "file": "a.csv",
        "prompt": "{{ text }}",
        "url": url,
        "model": "m",
        "judge_prompt": "Q {{ text }} A {{ answer }}",
        "retries": 2,
    }
    return JudgeKeys.model_validate(settings | changed)


def scorer_of(judge: FakeJudge, pauses: list[float] | None = None, **changed: Any) -> JudgeScorer:
    keys = keys_of(f"http://127.0.0.1:{judge.server_port}/v1", **changed)
    opened = KINDS["judge"].open(keys, Path(), lambda key: key)
    assert isinstance(opened, JudgeScorer)
    return JudgeScorer(keys, opened.template, opened.folder, pause=(pauses if pauses is not None else []).append)


def test_the_judge_reads_row_and_answer_and_its_last_number_counts(judge: FakeJudge) -> None:
    scored = scorer_of(judge, scale=[0, 10], score_pattern=r"give it (\d+)").score(ITEM, "Hi!")
    assert (scored.score, scored.prediction) == (0.8, "Hi!")
    body, key = judge.asked[0]
    assert body["messages"] == [{"role": "user", "content": "Q Hello? A Hi!"}]
    assert (body["model"], body["temperature"], body["seed"], key) == ("m", 0, 0, None)
    judge.reply = "Out of 10 I say: 7"
    assert scorer_of(judge, pass_from=7).score(ITEM, "other").score == 1.0
    assert scorer_of(judge, pass_from=7.5, judge_seed=1).score(ITEM, "other").score == 0.0


def test_a_reply_is_kept_by_all_that_it_depends_on(judge: FakeJudge) -> None:
    for _ in range(2):
        scorer_of(judge).score(ITEM, "Hi!")
    assert len(judge.asked) == 1
    scorer_of(judge).score(ITEM, "Ho!")
    scorer_of(judge, model="other").score(ITEM, "Hi!")
    scorer_of(judge, judge_seed=1).score(ITEM, "Hi!")
    scorer_of(judge, judge_system="Be strict.").score(ITEM, "Hi!")
    assert len(judge.asked) == 5
    assert scorer_of(judge, scale=[0, 20]).score(ITEM, "Hi!").score == 0.5  # the same reply, another scale


def test_the_key_comes_from_the_named_variable_and_must_be_there(
    judge: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(f"http://127.0.0.1:{judge.server_port}/v1", api_key_env="JUDGE_KEY")
    prepare = KINDS["judge"].prepare
    assert prepare is not None
    with pytest.raises(DataError, match=r"s\.yaml:3:1: api_key_env: the variable JUDGE_KEY is not set"):
        prepare(keys, lambda key: f"s.yaml:3:1: {key}")
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    prepare(keys, str)
    scorer_of(judge, api_key_env="JUDGE_KEY").score(ITEM, "Hi!")
    assert judge.asked[-1][1] == "Bearer sesame"


def test_a_failure_is_tried_again_with_longer_pauses(judge: FakeJudge) -> None:
    judge.statuses, pauses = [500, 429], []
    assert scorer_of(judge, pauses).score(ITEM, "Hi!").score == 1.0
    assert pauses == [0.5, 1.0]


def test_a_judge_that_keeps_failing_ends_the_run(judge: FakeJudge) -> None:
    judge.statuses = [500] * 3
    with pytest.raises(DataError, match=r"judge http://127.0.0.1:\d+/v1: item 'i7': status 500 after 3 tries"):
        scorer_of(judge).score(ITEM, "Hi!")
    judge.statuses = [401]
    with pytest.raises(DataError, match="status 401 after one try"):
        scorer_of(judge).score(ITEM, "Hi!")


def test_a_judge_that_hangs_ends_the_run(judge: FakeJudge) -> None:
    judge.delay_s = 0.5
    with pytest.raises(DataError, match="no reply in time after 3 tries"):
        scorer_of(judge, timeout_s=0.05).score(ITEM, "Hi!")


def test_a_judge_that_is_down_is_noticed_before_the_run_and_in_it() -> None:
    keys, prepare = keys_of("http://127.0.0.1:9/v1", retries=0), KINDS["judge"].prepare
    assert prepare is not None
    with pytest.raises(DataError, match=r"url: http://127\.0\.0\.1:9/v1 cannot be reached") as raised:
        prepare(keys, str)
    assert "\n" not in str(raised.value)
    with pytest.raises(DataError, match="after one try; nothing is judged without it"):
        KINDS["judge"].open(keys, Path(), str).score(ITEM, "Hi!")


@pytest.mark.parametrize(
    ("reply", "raw", "message"),
    [
        ("It is fine.", "", "replied 'It is fine.', in which there is no score"),
        ("11", "", r"gave 11, outside of the scale 1 to 10"),
        ("", "no json", "its reply is none of the OpenAI API"),
        ("", '{"choices": []}', "its reply is none of the OpenAI API"),
    ],
)
def test_a_reply_without_a_score_ends_the_run(judge: FakeJudge, reply: str, raw: str, message: str) -> None:
    judge.reply, judge.raw = reply, raw
    with pytest.raises(DataError, match=message):
        scorer_of(judge).score(ITEM, "Hi!")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"url": "localhost:8000"}, "such as https://host/v1"),
        ({"url": "http://me:pw@host/v1"}, "must hold no password"),
        ({"score_pattern": r"\d"}, "with one group"),
        ({"scale": [5, 1]}, "the lower number first"),
        ({"pass_from": 11}, "outside of the scale"),
    ],
)
def test_settings_that_cannot_be_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        keys_of(**{"url": "http://h/v1", **changed})
