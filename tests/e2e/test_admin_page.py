"""docs/admin.md, typed as it is after `relaxd up`: every command answers as the page says."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Workplace
from tests.kit.processes import ROOT
from tests.kit.shell import Shell, make_task
from tests.kit.waiting import wait_until

BLOCK = re.compile(r"```console\n\$ (.+)\n(?:((?:.*\n)*?))?```")
CODE = re.compile(r"^  Code: \w+$", re.MULTILINE)
NAME = re.compile(r'^ {2,4}"(\w+)":', re.MULTILINE)
"""A field near the top of an answer; deeper ones, such as a step's metrics, come and go."""
VARIABLE = re.compile(r"(\w+)=\$\(")
MAY_BE_AWAY = {"waiting_for", "groups", "queues"}
"""Fields that are empty while a run's steps end as usual, and those that a run has once its board is there."""


@pytest.fixture
def shell(tmp_path: Path, tiny_model: Path) -> Iterator[Shell]:
    make_task(tmp_path, tiny_model)
    reward = tmp_path / "reward.py"  # takes its time: an endless run leaves the processors to what the page starts
    reward.write_text("import time\n" + reward.read_text().replace("    words =", "    time.sleep(0.1)\n    words ="))
    place = Workplace(tmp_path)
    code, output = place.relaxd("up", "--port", "0")
    assert code == 0, output
    yield Shell(tmp_path)
    code, output = place.relaxd("down")
    assert code == 0, output


def like_the_page(output: str, page: str) -> bool:
    """Whether an answer has the page's error, if any, and its fields."""
    same_error = CODE.findall(output) == CODE.findall(page)
    same_fields = {*NAME.findall(page)} - MAY_BE_AWAY <= {*NAME.findall(output)}
    return same_error and bool(output.strip()) == bool(page.strip()) and same_fields


@pytest.mark.night
@pytest.mark.timeout(600)
def test_the_page_works_as_it_is(shell: Shell) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "admin.md").read_text())
    assert len(blocks) > 35
    variables: dict[str, str] = {}
    """The commands that set them."""
    for command, page in blocks:
        seen: list[str] = []

        def answers(command: str = command, page: str = page, seen: list[str] = seen) -> bool:
            for name, line in variables.items():
                if seen and f"${name}" in command:  # what it was may be over, as a synchronisation is
                    shell.run(line)
            seen.append(shell.run(command))
            return like_the_page(seen[-1], page)

        def explain(page: str = page, seen: list[str] = seen) -> str:
            return "\n---\n".join([page, *seen[:1], *seen[-1:]])

        # What needs a step, a second replica or the end of the run is typed again until it is there.
        wait_until(answers, command, 100, explain=explain, pause_seconds=0.3)
        if match := VARIABLE.match(command):
            variables[match[1]] = command
