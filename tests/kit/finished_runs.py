"""Checks of a finished run's folder: its books, its receipts, and warnings in its logs."""

import json
import re
from pathlib import Path
from typing import Any

from relaxd.run_folder import read_lines

TOLD_OF_THE_MACHINE = re.compile(
    "reward workers are limited in"  # Linux doesn't let tests limit them in everything
    r"|, for \d+ (s|min)( now)?$"  # a wait: a machine that does much else takes more than ten seconds for many things
)
"""Warnings of a run without a fault."""


def read_summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def check_books(summary: dict[str, Any], steps: int, groups_per_step: int = 2) -> None:
    assert summary["steps"] == steps
    assert summary["trained"] == steps * groups_per_step
    assert summary["in_flight"] == 0
    assert summary["published"] == summary["trained"] + summary["dropped"]


def check_receipts(folder: Path) -> None:
    """Each sample of a run with weights.verify = "always" has receipts for weights that were sent."""
    sent = {(line["version"], line["digest"]) for line in read_lines(folder / "weights.jsonl")}
    last = max(line["step"] for line in read_lines(folder / "metrics.jsonl"))
    versions = sorted(version for version, _ in sent)
    # A version that the trainer has replaced before it could be sent is left out.
    assert set(versions) <= set(range(last + 1))
    assert (versions[0], versions[-1], len(versions)) == (0, last, len(set(versions)))
    assert len({digest for _, digest in sent}) > 1, "the run has trained"
    samples = list(read_lines(folder / "samples.jsonl"))
    assert samples
    for sample in samples:
        found = {(one["version"], one["digest"]) for one in sample["receipts"]}
        assert found
        assert found <= sent
        assert sample["version"] in {version for version, _ in found}
        assert all(one["engine"].startswith("rollout") for one in sample["receipts"])


def warnings_of(folder: Path) -> list[str]:
    """The lines at WARNING or above, and of tracebacks, in the logs of a run's folder; none of the machine."""
    found = [
        line
        for log in sorted((folder / "logs").glob("*.log"))
        for line in log.read_text().splitlines()
        if re.search(r"^\S+Z (WARNING|ERROR|CRITICAL) |^\s*Traceback ", line)
    ]
    return [line for line in found if not TOLD_OF_THE_MACHINE.search(line)]
