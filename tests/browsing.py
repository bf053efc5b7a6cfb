"""Debian's Chromium for tests of pages: who may skip without it, and what it is started with."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def started_browser() -> Iterator[Browser]:
    """A browser for a fixture to yield. Without one tests skip, unless QUANTPIPE_TEST_BROWSER=1 demands it."""
    if not CHROMIUM.exists():
        if os.environ.get("QUANTPIPE_TEST_BROWSER") == "1":
            pytest.fail(f"{CHROMIUM} is missing, and QUANTPIPE_TEST_BROWSER=1 demands it")
        pytest.skip(f"{CHROMIUM} is missing: install Debian's chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS.split())
        yield started
        started.close()


@contextmanager
def opened(browser: Browser, url: str, color_scheme: str = "light") -> Iterator[tuple[Page, list[str]]]:
    """The page, what the browser complains of while it is open, and what it asks of others than ``url``."""
    complaints: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type == "error":
            complaints.append(message.text)

    scheme = "dark" if color_scheme == "dark" else "light"
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1100, "height": 1400})  # type: ignore[arg-type]
    page.on("console", hear)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: request.url.startswith((url, "data:")) or complaints.append(request.url))
    try:
        page.goto(url)
        yield page, complaints
    finally:
        page.close()


def num_pixels(screenshot: bytes, colours_rgb: tuple[tuple[int, int, int], ...]) -> int:
    """Pixels in one of the colours, or nearly."""
    pixels_HWC = np.asarray(Image.open(io.BytesIO(screenshot)).convert("RGB"), dtype=np.int64)
    return sum(int((abs(pixels_HWC - colour_rgb).max(axis=-1) < 40).sum()) for colour_rgb in colours_rgb)
