"""What a run's folder knows of the curriculum: every closed group in groups.jsonl, and a snapshot of the record.

Each closed group has one line in groups.jsonl, also if a coordinator died while it wrote (docs/ledger.md). So the
record follows from the file, and counts no group twice. The snapshot only saves reading the file from its beginning:
its first line is JSON, the rest are the arrays.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from relaxd.data.curriculum.record import Record
from relaxd.run_folder import CURRICULUM, GROUPS, read_lines

logger = logging.getLogger(__name__)

SNAPSHOT_GROUPS = 50_000
"""Closed groups between two snapshots: as many are read within a second."""


def load(record: Record, folder: Path) -> int:
    """Fill an empty record from a run's folder. Returns the number of bytes of groups.jsonl that it has."""
    groups = folder / GROUPS
    end = groups.stat().st_size if groups.is_file() else 0
    start = _read_snapshot(record, folder / CURRICULUM, end)
    if unknown := record.observe(read_lines(groups, start)):
        logger.warning("%s has %d groups of prompts that the data doesn't have: has it changed?", groups, unknown)
    return end


def save(record: Record, folder: Path, end: int) -> None:
    """Write a snapshot of a record that has `end` bytes of groups.jsonl."""
    with record.lock:
        head = {"prompts": len(record), "end": end, "visits": record.visits}
        tries, pass_rate = record.tries.tobytes(), record.pass_rate.tobytes()
    temporary = (folder / CURRICULUM).with_suffix(".tmp")
    temporary.write_bytes(json.dumps(head).encode() + b"\n" + tries + pass_rate)
    os.replace(temporary, folder / CURRICULUM)


def _read_snapshot(record: Record, path: Path, end: int) -> int:
    """Restore a record from a snapshot, if there is one of these prompts. Returns the bytes that it has; else 0."""
    try:
        first, _, arrays = path.read_bytes().partition(b"\n")
        head: dict[str, Any] = json.loads(first)
        prompts = int(head["prompts"])
        if prompts != len(record) or int(head["end"]) > end:
            raise ValueError(f"it is of {prompts} prompts and {head['end']} bytes, not of {len(record)} and {end}")
        tries = np.frombuffer(arrays, np.uint16, prompts)
        record.restore(tries, np.frombuffer(arrays, np.float32, prompts, tries.nbytes), head["visits"])
        return int(head["end"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s doesn't fit, so pass rates are counted again from %s: %s", path, GROUPS, error)
        return 0
