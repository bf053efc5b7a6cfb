"""The page in a real browser: it shows what is served, draws what happens, and chats, with a key or without one."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from browsing import num_pixels, opened, started_browser
from playwright.sync_api import Browser, Page, expect

from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.keys import ApiKey, digest_of
from quantpipe.serve.page import read_page
from quantpipe.serve.shadow.options import ShadowOptions

PLOTS = ("ttft", "tpot", "throughput", "kv", "queue")
LINES_RGB = ((11, 98, 196), (194, 87, 12))  # --first and --second of the light page: the colours of the lines
StartServer = Callable[..., Any]
MakeEngine = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from started_browser()


@contextmanager
def load(url: str, **headers: str) -> Iterator[None]:
    """Requests one after the other while the block lasts."""
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, headers=headers, timeout=20) as client:
            while not is_over.is_set():
                body = {"model": "echo", "prompt": "some text", "stream": True}
                assert client.post("/v1/completions", json=body).status_code == 200

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def num_drawn(screenshot: bytes) -> int:
    """Pixels in the colours of a plot's lines, or nearly. Where two lines are equal, the second covers the first."""
    return num_pixels(screenshot, LINES_RGB)


def drawn(page: Page, plot: str) -> int:
    return num_drawn(page.locator(f"#plot-{plot}").screenshot())


def is_soon_drawn(page: Page, plot: str) -> bool:
    """Whether there is a line, and not just its first point. Wait for that: the page asks once in a second."""
    for _ in range(40):
        if drawn(page, plot) > 20:
            return True
        page.wait_for_timeout(500)
    return False


def test_page_shows_what_is_served_and_draws_what_happens(
    browser: Browser, start_server: StartServer, make_engine: MakeEngine
) -> None:
    server = start_server(make_engine(step_s=0.01))
    with opened(browser, server.url) as (page, complaints):
        expect(page.locator("#model")).to_have_text("echo")
        expect(page.locator("#verdict")).to_have_text("not judged")
        expect(page.locator("#facts")).to_contain_text("512 tokens")
        expect(page.locator("#key-form")).to_be_hidden()
        empty = {plot: drawn(page, plot) for plot in ("ttft", "tpot")}
        assert empty == {"ttft": 0, "tpot": 0}, "nothing has happened: there is nothing to draw"
        with load(server.url):
            shown = (("ttft", "p50 [0-9]"), ("tpot", "p50 [0-9]"), ("throughput", "[1-9]"), ("queue", "running [1-9]"))
            for plot, text in shown:
                label = re.compile(f": +{text}")
                expect(page.locator(f"#plot-{plot}")).to_have_attribute("aria-label", label, timeout=20_000)
            for plot in PLOTS:
                assert is_soon_drawn(page, plot), f"the plot {plot} is empty"
        assert complaints == []


def test_chat_streams_goes_on_and_can_be_stopped(
    browser: Browser, start_server: StartServer, make_engine: MakeEngine
) -> None:
    server = start_server(make_engine(step_s=0.02))
    with opened(browser, server.url) as (page, complaints):
        expect(page.locator("#model")).to_have_text("echo")
        page.fill("#prompt", "<b>hi</b>")
        page.press("#prompt", "Enter")
        turn = page.locator("#turns li.assistant").nth(0)
        expect(turn).to_have_text(re.compile("^user:"))
        assert not (turn.text_content() or "").endswith("assistant:"), "it comes in pieces"
        expect(turn).to_have_text("user:<b>hi</b>;assistant:")
        expect(page.locator("#send")).to_be_enabled()
        page.fill("#prompt", "x" * 100)
        page.click("#send")
        expect(page.locator("#turns li.assistant").nth(1)).to_have_text(
            re.compile("^user:<b>hi</b>;assistant:user:<b>hi</b>;assistant:;user:x")
        )
        page.click("#stop")
        expect(page.locator("#send")).to_be_enabled()
        assert page.locator("#turns b").count() == 0, "text is text"
        page.fill("#prompt", "refuse")
        page.click("#send")
        expect(page.locator("#turns li.error")).to_contain_text("not this")
        page.click("#clear")
        assert page.locator("#turns li").count() == 0
    deadline = time.monotonic() + 5
    while server.engine.has_unfinished:  # the answer that was stopped is not computed to its end
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [text for text in complaints if "400" not in text] == []


def test_page_shows_each_arm_and_how_a_shadow_compares(
    browser: Browser, start_server: StartServer, make_engine: MakeEngine
) -> None:
    options = FrontOptions(shadow=ShadowOptions())
    server = start_server(make_engine(), options=options, second=make_engine())
    with opened(browser, server.url) as (page, complaints):
        rows = page.locator("#arms-table tr")
        expect(rows).to_have_count(3)
        expect(rows.nth(1)).to_contain_text("echo-a")
        expect(rows.nth(2)).to_contain_text("shadow")
        expect(page.locator("#shadow")).to_contain_text("none yet")
        for _ in range(2):
            assert server.post("/v1/completions", model="echo", prompt="abc", temperature=0).status_code == 200
        expect(page.locator("#shadow")).to_contain_text("2 compared")
        expect(page.locator("#shadow")).to_contain_text("100 % of 2")
        page.fill("#prompt", "hi")
        page.press("#prompt", "Enter")
        expect(page.locator("#turns li.assistant")).to_have_attribute("title", "arm a")
        server.second_loop._supervisor._launch.launched[-1].kill()
        expect(rows.nth(2).locator("td.bad")).to_have_text(re.compile("failed|starting"))
        assert complaints == []
    with opened(browser, start_server(make_engine()).url) as (page, _):
        expect(page.locator("#model")).to_have_text("echo")
        expect(page.locator("#arms")).to_be_hidden()


def test_page_asks_for_a_key_and_forgets_it(
    browser: Browser, start_server: StartServer, make_engine: MakeEngine
) -> None:
    options = FrontOptions(keys=[ApiKey("alice", digest_of("for-alice"))])
    server = start_server(make_engine(step_s=0.005), options=options)
    with opened(browser, server.url) as (page, _):
        expect(page.locator("#state")).to_have_text("an API key is needed")
        expect(page.locator("#facts")).to_be_empty()
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#state")).to_have_text("this key is not known here")
        page.fill("#key", "for-alice")
        page.press("#key", "Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#model")).to_have_text("echo")
        page.fill("#prompt", "hi")
        page.press("#prompt", "Enter")
        expect(page.locator("#turns li.assistant")).to_have_text("user:hi;assistant:")
        stored = "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}])"
        assert page.evaluate(stored) == '["",{},{}]'
        assert "for-alice" not in page.content()
        page.reload()
        expect(page.locator("#state")).to_have_text("an API key is needed")


def test_script_that_gets_into_the_document_is_not_run_and_nothing_else_is_asked(
    browser: Browser, start_server: StartServer, make_engine: MakeEngine
) -> None:
    server = start_server(make_engine())
    with opened(browser, server.url) as (page, complaints):
        expect(page.locator("#model")).to_have_text("echo")
        page.evaluate(
            "() => { const own = document.createElement('script'); own.textContent = 'window.ran = true';"
            " document.body.append(own); }"
        )
        assert page.evaluate("window.ran") is None
        assert any("Content Security Policy" in text for text in complaints)
        failed = page.evaluate("fetch('http://127.0.0.2:1/').then(() => 'asked', (error) => error.name)")
        assert failed == "TypeError"


def test_answer_is_shown_as_text_whatever_it_holds(
    browser: Browser, start_server: StartServer, make_engine: MakeEngine
) -> None:
    """Our tokenizer has no token that is a whole tag, so the browser gets its answer from here."""
    tag = "<img src=x><b>bold</b>"
    event = {"choices": [{"delta": {"content": tag}}]}
    server = start_server(make_engine())
    with opened(browser, server.url) as (page, _):
        expect(page.locator("#model")).to_have_text("echo")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {json.dumps(event)}\n\n"))
        page.fill("#prompt", tag)
        page.press("#prompt", "Enter")
        expect(page.locator("#turns li")).to_have_text([tag, tag])
        assert page.locator("#turns b, #turns img").count() == 0


def test_page_is_one_document_with_a_policy_that_allows_itself_only(server: Any) -> None:
    reply = server.http.get("/")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert re.findall(r"(?:src|href)=\"(?!data:)", reply.text) == []
    assert "http:" not in read_page().html and "https:" not in read_page().html
