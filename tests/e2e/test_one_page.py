"""examples/one_page.py: the loop without services learns."""

import re

import pytest

from tests.kit.processes import run_python


@pytest.mark.slow
def test_the_loop_on_one_page_learns() -> None:
    done = run_python("examples/one_page.py", seconds=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(reward) for reward in re.findall(r"^step +\d+  reward ([\d.]+)", done.stdout, re.MULTILINE)]
    assert len(rewards) == 12, done.stdout
    assert rewards[-1] > rewards[0] + 0.3, rewards
    assert done.stdout.endswith(f"letters: {rewards[-1]:.0%} of an answer now, by chance 20%\n"), done.stdout
