"""Ledgers, written as a trainer writes them."""

import json
from dataclasses import asdict
from pathlib import Path

from relaxd.board import LedgerEntry
from services.trainer.batch.step_plan import MicroBatchRound, MiniBatch, SequenceSlice, StepPlan


def plan(step: int) -> StepPlan:
    group = f"0-{step:06d}"
    rounds = (MicroBatchRound((((SequenceSlice(group, (0, 1)),),),)),)
    return StepPlan(step, 3, 0, (group,), (MiniBatch(rounds, samples=2, trained_tokens=5, normalizer=5.0),))


def write_ledger(folder: Path, steps: list[int]) -> list[LedgerEntry]:
    entries = [LedgerEntry(step, 1.5, 3, plan(step).to_json(), {"loss": 0.1}) for step in steps]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in entries))
    return entries
