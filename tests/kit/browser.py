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


CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([red, green, blue]) => [red, green, blue].map((part) => part / 255)
    .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const [red, green, blue, alpha = 1] = parse(getComputedStyle(one).backgroundColor);
      if (alpha === 1) return [red, green, blue];
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll('body *')].flatMap((element) => {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest('.written, .chart, :disabled, noscript')) return [];
    const [one, other] = [light(parse(getComputedStyle(element).color)), light(ground(element))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    return ratio < 4.5 ? [`${element.outerHTML.slice(0, 80)}: ${ratio.toFixed(2)}`] : [];
  });
}"""
"""Texts whose contrast is less than WCAG 2.2 AA asks for."""
UNNAMED = """() => [...document.querySelectorAll('input, select, button')]
  .filter((one) => one.checkVisibility() && !(one.ariaLabel || one.labels?.length || one.textContent.trim()))
  .map((one) => one.outerHTML)"""
"""Controls that a screen reader has no name for."""


def unreadable(page: Page) -> list[str]:
    """Return texts of a page that have little contrast, controls without a name, and whether it is too wide."""
    found: list[str] = [*page.evaluate(CONTRAST), *page.evaluate(UNNAMED)]
    fits = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    return found if fits else [*found, "the page is wider than the window"]
