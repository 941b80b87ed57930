"""The Chinese pages show the same commands, in the same order, as the English ones."""

import re

import pytest

from tests.kit.processes import ROOT

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"\s+# .*$", re.MULTILINE)
TABLE_COMMAND = re.compile(r"^\| `(relaxd [^`]*)` \|", re.MULTILINE)


def shown(page: str) -> list[tuple[str, str]]:
    """Return the blocks of a page, without comments, which are translated, and the commands of its tables."""
    text = (ROOT / page).read_text()
    blocks = [(language, COMMENT.sub("", block)) for language, block in BLOCK.findall(text)]
    return blocks + [("", command) for command in TABLE_COMMAND.findall(text)]


@pytest.mark.parametrize(
    ("english", "chinese"), [("README.md", "README.zh.md"), ("docs/first-hour.md", "docs/zh/first-hour.md")]
)
def test_chinese_pages_show_the_same_commands(english: str, chinese: str) -> None:
    assert shown(chinese) == shown(english)
    assert len(shown(english)) >= 5
