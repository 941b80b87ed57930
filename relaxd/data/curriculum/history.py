"""The curriculum's history in a run's folder: closed groups in groups.jsonl, and a snapshot of the record.

Each closed group has one line in groups.jsonl that counts (`closed_groups`), also if a coordinator died while it wrote
(docs/ledger.md). So the record follows from the file, and counts no group twice. The snapshot only saves reading the
file from its beginning: its first line is JSON, the rest are the arrays.
"""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from relaxd.data.curriculum.record import PromptRecord
from relaxd.run_folder import CURRICULUM, GROUPS, closed_groups

logger = logging.getLogger(__name__)

SNAPSHOT_GROUPS = 50_000
"""Closed groups between two snapshots: as many are read within a second."""


def load(record: PromptRecord, folder: Path) -> str:
    """Fill an empty record from a run's folder. Returns the last entry of groups.jsonl that it has, "" without one."""
    groups = folder / GROUPS
    size = groups.stat().st_size if groups.is_file() else 0
    start, last = _read_snapshot(record, folder / CURRICULUM, size)

    def lines() -> Iterator[dict[str, Any]]:
        nonlocal last
        for line in closed_groups(folder, start, last):
            last = str(line.get("entry", last))
            yield line

    if unknown := record.observe(lines()):
        logger.warning("%s has %d groups of prompts that the data doesn't have: has it changed?", groups, unknown)
    return last


def save(record: PromptRecord, folder: Path, end: int, last: str) -> None:
    """Write a snapshot of a record that has `end` bytes of groups.jsonl, up to the entry `last`."""
    with record.lock:
        head = {"prompts": len(record), "end": end, "last": last, "visits": record.visits}
        tries, pass_rate = record.tries.tobytes(), record.pass_rate.tobytes()
    temporary = (folder / CURRICULUM).with_suffix(".tmp")
    temporary.write_bytes(json.dumps(head).encode() + b"\n" + tries + pass_rate)
    os.replace(temporary, folder / CURRICULUM)


def _read_snapshot(record: PromptRecord, path: Path, size: int) -> tuple[int, str]:
    """Restore a record from a snapshot of these prompts and of a file of at most this size.

    Returns its bytes and last entry; 0 and "" without such a snapshot.
    """
    try:
        first, _, arrays = path.read_bytes().partition(b"\n")
        head: dict[str, Any] = json.loads(first)
        prompts = int(head["prompts"])
        end, last = int(head["end"]), str(head["last"])
        if prompts != len(record) or end > size:
            raise ValueError(f"it is of {prompts} prompts and {end} bytes, not of {len(record)} and {size}")
        tries = np.frombuffer(arrays, np.uint16, prompts)
        record.restore(tries, np.frombuffer(arrays, np.float32, prompts, tries.nbytes), head["visits"])
        return end, last
    except FileNotFoundError:
        return 0, ""
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s doesn't fit, so pass rates are counted again from %s: %s", path, GROUPS, error)
        return 0, ""
