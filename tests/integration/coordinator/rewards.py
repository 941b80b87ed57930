"""A reward that never works, and one that does as it is told."""

import os
import time
from pathlib import Path

from relaxd.rewards import RewardInput


def broken(sample: RewardInput) -> float:
    raise ValueError("told to fail")


def as_told(sample: RewardInput) -> float:
    """Fail, hang or work, as the file says that $TOLD names."""
    told = Path(os.environ["TOLD"])
    while told.read_text() == "hang":
        time.sleep(0.1)
    if told.read_text() == "raise":
        raise ValueError("told to fail")
    return 1.0
