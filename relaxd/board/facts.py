"""Facts about a group: a few numbers that outlive its columns, for the account of every prompt's fate."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from relaxd.board.schema import CONTINUED
from relaxd.board.types import JSON, Column


def facts_of(columns: Mapping[str, Column]) -> dict[str, float]:
    """Return the summary figures of a stage's columns.

    tokens: mean length of the group's samples; truncated: share of samples that ended at max_new_tokens; continued:
    maximum number of times that a sample was cut off and continued (where the run counts them); reward:
    mean.
    """
    facts: dict[str, float] = {}
    lengths, samples, finish = columns.get("lengths"), columns.get("sample_of_sequence"), columns.get("finish")
    if isinstance(lengths, np.ndarray) and isinstance(samples, np.ndarray) and lengths.size:
        facts["tokens"] = round(float(lengths.sum()) / max(1, np.unique(samples).size), 1)
    if isinstance(finish, list) and finish:
        facts["truncated"] = round(finish.count("length") / len(finish), 4)
    continued = columns.get(CONTINUED)
    if isinstance(continued, np.ndarray) and continued.size:
        facts["continued"] = int(continued.max())
    reward = columns.get("reward")
    if isinstance(reward, np.ndarray) and reward.size:
        facts["reward"] = round(float(reward.mean()), 6)
    return facts


def facts_json(facts: Mapping[str, JSON]) -> str:
    """Return facts as the board stores them; "" for none."""
    return json.dumps(dict(facts), separators=(",", ":")) if facts else ""


def parse_fate(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return the record of an entry in the stream of fates. Raises ValueError, KeyError: it is damaged."""
    record: dict[str, Any] = {"group": fields[b"group"].decode()}
    if b"step" in fields:
        record["step"] = int(fields[b"step"])
    else:
        record |= {"reason": fields[b"reason"].decode(), "stage": fields[b"stage"].decode()}
        record |= {"attempt": int(fields[b"attempt"]), "retried": fields[b"retried"] == b"1"}
    for name, value in fields.items():
        if name.startswith(b"facts:"):
            record |= json.loads(value)
    return record
