"""A run's folder that goes back to an earlier step: what stays, what is set aside, what is refused."""

import json
import os
from pathlib import Path

import pytest

from relaxd.config import RunConfig
from relaxd.rewinding import NoWayBack, rewind
from relaxd.run_folder import CHECKPOINT_STATE, checkpoint_path, checkpoint_steps, critic_folder, model_path
from services.coordinator.runs.restoring import read_ledger, read_run
from services.coordinator.runs.run_files import held_folder
from services.coordinator.state.records import Evaluation, Outcome, Phase, RunRecord
from tests.kit.models import make_tiny_model
from tests.unit.coordinator.runs.ledger_files import write_ledger

LAST = 6


def make_run(folder: Path, *, critic: tuple[int, ...] = (), model: str = "model") -> Path:
    """The folder of a run that has ended after LAST steps, with a checkpoint every second step."""
    folder.mkdir()
    write_ledger(folder, list(range(1, LAST + 1)))
    for name in ("metrics", "samples", "groups"):
        lines = [{"step": step, "text": "é" * step} for step in (1, 1, 2, 3, 4, 4, 5, 6)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    owners = {folder: (2, 4, 6), critic_folder(folder): critic}
    for owner, step in ((owner, step) for owner, steps in owners.items() for step in steps):
        checkpoint_path(owner, step).mkdir(parents=True)
        state = {"step": step, "term": 3, "board": {"cursor": {"epoch": 0, "position": step}, "open_groups": []}}
        (checkpoint_path(owner, step) / CHECKPOINT_STATE).write_text(json.dumps(state))
    (folder / "steps").mkdir()
    (folder / "steps" / "step-000006.safetensors").write_text("x")
    for step in (2, 6):
        model_path(folder, step).mkdir(parents=True)
    (folder / "evaluations" / "math").mkdir(parents=True)
    for name in (
        "evaluations/step-000002.jsonl",
        "evaluations/step-000005.jsonl",
        "evaluations/math/step-000005.jsonl",
    ):
        (folder / name).touch()
    (folder / "summary.json").write_text("{}")
    config = RunConfig.model_validate(
        {
            "run": {"steps": LAST},
            "model": {"path": model},
            "data": {"source": "addition"},
            "reward": {"name": "addition"},
        }
    )
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "config.toml").touch()
    record = RunRecord(
        run_id="r",
        config_json=config.model_dump_json(),
        folder=str(folder),
        phase=Phase.STOPPED,
        outcome=Outcome.COMPLETED,
        reason="completed",
        evaluations=tuple(Evaluation(step=step, metrics={}) for step in (0, 2, 5)),
    )
    (folder / "run.json").write_text(record.model_dump_json())
    return folder


def steps_in(folder: Path, name: str) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_later_steps_are_set_aside_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", critic=(4,), model=str(make_tiny_model(tmp_path / "tiny")))
    before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    aside = rewind(folder, 4, reset_moments=True)
    for name in ("metrics", "samples", "groups"):
        assert steps_in(folder, name) == [1, 1, 2, 3, 4, 4]
        assert steps_in(aside, name) == [1, 1, 2, 3, 4, 4, 5, 6]
    assert checkpoint_steps(folder) == [4, 2]
    assert checkpoint_steps(aside) == [6]
    assert {path.name for path in (folder / "models").iterdir()} == {"step-000002"}
    # Nothing is lost: every file is where it was, or aside, as it was.
    assert {
        name: ((aside / name) if (aside / name).exists() else (folder / name)).read_bytes() for name in before
    } == before
    restored = read_run(str(folder))
    assert [entry.step for entry in restored.ledger] == [1, 2, 3, 4]
    assert (restored.record.phase, restored.record.outcome, restored.record.patience_from) == (Phase.RUNNING, None, 4)
    assert [evaluation.step for evaluation in restored.record.evaluations] == [0, 2]
    assert restored.config.trainer.reset_moments_after == (4,)
    assert json.loads((folder / "config.json").read_text())["trainer"]["reset_moments_after"] == [4]


def test_an_interrupted_way_back_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops before each of its moves in turn; the next call does the rest."""
    rename, replace = os.rename, os.replace
    for number in range(100):
        folder = make_run(tmp_path / f"run-{number}")
        left = number

        def stops(real: object) -> object:
            def call(*paths: object) -> None:
                nonlocal left
                if left == 0:
                    raise KeyboardInterrupt
                left -= 1
                real(*paths)  # type: ignore[operator]

            return call

        monkeypatch.setattr(os, "rename", stops(rename))
        monkeypatch.setattr(os, "replace", stops(replace))
        try:
            rewind(folder, 2)
        except KeyboardInterrupt:
            monkeypatch.undo()
            rewind(folder, 2)
        else:
            break
        assert [entry.step for entry in read_ledger(folder)] == [1, 2]
        assert checkpoint_steps(folder) == [2]
        assert steps_in(folder, "samples") == [1, 1, 2]
        assert RunRecord.model_validate_json((folder / "run.json").read_bytes()).phase == Phase.RUNNING
    assert number > 10


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", critic=(2,))
    with pytest.raises(NoWayBack, match="no checkpoint of step 3: there are checkpoints of steps 2, 4, 6"):
        rewind(folder, 3)
    with pytest.raises(NoWayBack, match="no checkpoint of the critic of step 4: there are checkpoints of steps 2"):
        rewind(folder, 4)
    with held_folder(folder, "s1"), pytest.raises(NoWayBack, match="stack s1 works on the run"):
        rewind(folder, 2)
    assert not (folder / "set-aside").exists()
