"""The documents: every page is in README's list, from which `make docs` builds a site, and links lead somewhere."""

import re
from functools import cache
from pathlib import Path

from tests.kit.cases import each
from tests.kit.processes import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as forges and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", one).lower()).replace(" ", "-") for one in headings
    }


@each("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(CODE.sub("", page.read_text())):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def test_readme_lists_every_page() -> None:
    listed = {(ROOT / target).resolve() for target, _ in LINK.findall((ROOT / "README.md").read_text())}
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in listed and page.name != "README.md"] == []
