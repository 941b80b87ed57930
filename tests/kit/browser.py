"""A headless Chromium, driven by Playwright: pages are seen as people see them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.kit.waiting import PATIENCE

expect.set_options(timeout=30_000 * PATIENCE)  # milliseconds; its own five seconds are short on a busy machine
NAMES = ("chromium", "chromium-browser", "google-chrome")


def require_browser() -> str:
    """Return the path of the Chromium that is installed.

    Without one the test is skipped, or fails where there has to be one (`.ci/run`).
    """
    if found := next((found for name in NAMES if (found := shutil.which(name))), None):
        return found
    if os.environ.get("RELAXD_TEST_BROWSER"):
        pytest.fail("no Chromium is installed")
    pytest.skip("no Chromium is installed: the JavaScript of pages is not run")


@contextmanager
def browser_page(*, width: int = 1200, height: int = 1600, dark: bool = False) -> Iterator[tuple[Page, list[str]]]:
    """Start a browser and end it with the block. Yields a page, and the errors that no script of it caught."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=require_browser(), args=["--no-sandbox"])
        try:
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
            )
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            yield page, errors
        finally:
            browser.close()
