"""Contents of a group's columns: a summary that outlives them, and its sequences for the stages that query a model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.board.schema import CONTINUED, TEACHER_PROMPT_TOKENS
from relaxd.board.types import JSON, Column
from relaxd.reasons import TRUNCATED
from relaxd.telemetry import trace_id

RIGHT_FROM = 1.0
"""Minimum reward with which a sample counts as right in training metrics."""


def facts_of(columns: Mapping[str, Column]) -> dict[str, float]:
    """Return figures that summarise a group, from the columns that a stage has written.

    tokens: mean length of the group's samples; truncated: share of samples that a limit cut off; continued:
    maximum number of times that a sample was cut off and continued (where the run counts them); reward:
    mean; samples: number of scored samples; right: number of right ones; equal_rewards: 1 if all rewards are equal.
    """
    facts: dict[str, float] = {}
    lengths, samples, finish = columns.get("lengths"), columns.get("sample_of_sequence"), columns.get("finish")
    if isinstance(lengths, np.ndarray) and isinstance(samples, np.ndarray) and lengths.size:
        facts["tokens"] = round(float(lengths.sum()) / max(1, np.unique(samples).size), 1)
        if isinstance(finish, list) and len(finish) == samples.size:
            last = dict(zip(samples.tolist(), finish, strict=True)).values()
            facts["truncated"] = round(sum(reason in TRUNCATED for reason in last) / len(last), 4)
    continued = columns.get(CONTINUED)
    if isinstance(continued, np.ndarray) and continued.size:
        facts["continued"] = int(continued.max())
    reward = columns.get("reward")
    if isinstance(reward, np.ndarray) and reward.size:
        facts["reward"] = round(float(reward.mean()), 6)
        facts |= {"samples": reward.size, "right": int((reward >= RIGHT_FROM).sum())}
        if (reward == reward[0]).all():
            facts["equal_rewards"] = 1
    return facts


def facts_json(facts: Mapping[str, JSON]) -> str:
    """Encode a group's summary figures as JSON, as the board stores them; "" if there are none."""
    return json.dumps(dict(facts), separators=(",", ":")) if facts else ""


def parse_fate(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Parse an entry of the stream of group outcomes. Raises ValueError, KeyError if it is damaged."""
    record: dict[str, Any] = {"group": fields[b"group"].decode()}
    if b"step" in fields:
        record["step"] = int(fields[b"step"])
    else:
        record |= {"reason": fields[b"reason"].decode(), "stage": fields[b"stage"].decode()}
        record |= {"attempt": int(fields[b"attempt"]), "retried": fields[b"retried"] == b"1"}
    for name, value in fields.items():
        if name.startswith(b"facts:"):
            record |= json.loads(value)
    if trace := trace_id(json.loads(fields.get(b"trace", b"{}"))):
        record["trace_id"] = trace
    return record


@dataclass(frozen=True)
class GroupSequence:
    """Sequence of a group: prompt, tokens and loss mask."""

    prompt: NDArray[np.integer]
    """Token ids of the prompt that the group's sequences share, [P]; empty if this sequence begins with its own."""
    tokens: NDArray[np.integer]
    """Token ids of the sequence after the shared prompt, [L]."""
    loss_mask: NDArray[np.uint8]
    """Loss mask of `tokens`: 1 for tokens to train on, else 0; uint8 [L]."""


def read_sequences(columns: Mapping[str, Column], prompt: str) -> list[GroupSequence]:
    """Return the sequences of a group, at least one.

    Args:
        columns: the group's columns.
        prompt: name of the column with the prompt that the sequences continue.

    Raises:
        ValueError: the columns are malformed.
    """
    needs = (prompt, "tokens", "lengths", "loss_mask", "shares_prompt")
    arrays: dict[str, NDArray[Any]] = {name: np.asarray(columns[name]) for name in needs}
    if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in arrays.values()):
        raise ValueError(f"{', '.join(needs)} must be arrays [values] of integers")
    tokens, lengths, mask, shares = (arrays[name] for name in needs[1:])
    if not lengths.size or (lengths < 0).any() or not int(lengths.sum()) == len(tokens) == len(mask):
        raise ValueError(
            f"lengths add up to {int(lengths.sum())}, but tokens has {len(tokens)} values and loss_mask {len(mask)}"
        )
    if len(shares) != len(lengths):
        raise ValueError(f"shares_prompt has {len(shares)} values for {len(lengths)} sequences")
    if prompt == TEACHER_PROMPT_TOKENS and not shares.all():
        raise ValueError(
            f"sequence {int(np.flatnonzero(shares == 0)[0])} begins with a prompt of its own, in whose place the "
            "teacher's prompt (roles.teacher.privileged_key) can't be put"
        )
    ends = np.cumsum(lengths)
    own = [slice(int(end - length), int(end)) for end, length in zip(ends, lengths, strict=True)]
    shared = arrays[prompt]
    return [
        GroupSequence(shared if shares[index] else shared[:0], tokens[part], (mask[part] != 0).astype(np.uint8))
        for index, part in enumerate(own)
    ]
