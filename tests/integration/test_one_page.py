"""examples/one_page.py: the loop without services learns."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_loop_on_one_page_learns() -> None:
    done = subprocess.run(
        [sys.executable, "examples/one_page.py"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(reward) for reward in re.findall(r"^step +\d+  reward ([\d.]+)", done.stdout, re.MULTILINE)]
    assert len(rewards) == 12, done.stdout
    assert rewards[-1] > rewards[0] + 0.3, rewards
