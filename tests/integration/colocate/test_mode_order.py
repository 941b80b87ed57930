"""Runs of different modes one after the other on the same services: the state of a run ends with the run."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import CONFIG, REWARD, Workplace, open_workplace
from tests.kit.models import make_tiny_model

MODES = {
    "async": (),
    "on-policy": ("--board.max_staleness", "0"),
    "colocated": ("--run.colocate", "true", "--board.max_staleness", "0"),
}
ORDER = ("async", "on-policy", "colocated", "async", "colocated", "on-policy", "async")
"""Each mode comes once after each other one."""


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path, make_tiny_model(tmp_path / "tiny")) as place:
        config = CONFIG.format(model=tmp_path / "tiny", steps=1)
        (tmp_path / "run.toml").write_text(config.replace("[eval]\nprompts = 4", "[eval]\nprompts = 0"))
        (tmp_path / "tiny_reward.py").write_text(REWARD)
        yield place


@pytest.mark.night
@pytest.mark.timeout(600)
def test_modes_follow_each_other_in_every_order(workplace: Workplace) -> None:
    pairs = set(itertools.pairwise(ORDER))
    assert pairs == {(one, other) for one in MODES for other in MODES if one != other}
    code, output = workplace.relaxd("up", "--port", "0")
    assert code == 0, output
    for number, mode in enumerate(ORDER):
        code, output = workplace.relaxd("run", "run.toml", "--run-id", f"{number}-{mode}", *MODES[mode], timeout=120)
        assert code == 0, f"{mode} after {ORDER[:number]}:\n{output}"
