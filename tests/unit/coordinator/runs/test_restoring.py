"""Restoring a run from its folder: ledger, step files, checks."""

import json
from pathlib import Path

import numpy as np
import pytest

from relaxd.board.sides.coordinator_side import LEDGER_STEPS
from relaxd.config import RunConfig
from relaxd.config.data import CurriculumConfig
from relaxd.data.dataset import load_data
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument
from relaxd.run_folder import is_run
from services.coordinator.runs.restoring import read_ledger, read_run
from services.coordinator.state.records import Outcome, Phase, RunRecord
from services.trainer.batch.step_plan import StepPlan, step_file_path, write_step_file
from tests.kit.models import make_tiny_model
from tests.unit.coordinator.runs.ledger_files import plan, write_ledger
from tests.unit.rollout.configs import run_config


def test_steps_after_the_last_line_come_from_their_files(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) == []
    written = write_ledger(tmp_path, [1, 2])
    for step in (2, 3, 4, 6):  # 6 can't follow 4
        write_step_file(step_file_path(tmp_path, step), plan(step), {f"0-{step:06d}": {"reward": np.zeros(2)}})
    found = read_ledger(tmp_path)
    assert found[:2] == written
    assert [(entry.step, entry.term, entry.metrics) for entry in found[2:]] == [(3, 3, {}), (4, 3, {})]
    assert [StepPlan.from_json(entry.plan) for entry in found[2:]] == [plan(3), plan(4)]
    path = step_file_path(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FailedPrecondition, match=r"step-000003.safetensors is damaged"):
        read_ledger(tmp_path)


def test_an_incomplete_last_line_is_skipped_and_other_damage_refused(tmp_path: Path) -> None:
    written = write_ledger(tmp_path, [1, 2])
    path = tmp_path / "ledger.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:30])
    assert read_ledger(tmp_path) == written
    path.write_text(whole[:30] + "\n" + whole)
    with pytest.raises(FailedPrecondition, match=r"ledger.jsonl is damaged in line 1"):
        read_ledger(tmp_path)
    write_ledger(tmp_path, [1, 3])
    with pytest.raises(FailedPrecondition, match=r"has step 3 in line 2: it must be 2"):
        read_ledger(tmp_path)


def test_of_steps_that_the_board_does_not_keep_only_the_groups_stay_in_memory(tmp_path: Path) -> None:
    written = write_ledger(tmp_path, list(range(1, LEDGER_STEPS + 3)))
    last = LEDGER_STEPS + 3  # the trainer wrote it, and nobody its line
    write_step_file(step_file_path(tmp_path, last), plan(last), {f"0-{last:06d}": {"reward": np.zeros(2)}})
    found = read_ledger(tmp_path)
    assert found[3:-1] == written[3:]
    assert [(entry.step, entry.plan, entry.metrics) for entry in found[:3]] == [
        (step, {"groups": [f"0-{step:06d}"]}, {}) for step in (1, 2, 3)
    ]
    assert StepPlan.from_json(found[-1].plan) == plan(last)


@pytest.mark.parametrize("name", ["run.json", "ledger.jsonl", "checkpoints", "steps"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / name).symlink_to(outside / name)
    with pytest.raises(InvalidArgument, match=f"its {name} is a link to the outside"):
        read_run(str(folder))
    (folder / name).unlink()
    (folder / name).symlink_to(folder / name)
    with pytest.raises(InvalidArgument, match="is a link to the outside"):
        read_run(str(folder))


def test_a_path_that_is_too_long_is_refused() -> None:
    folder = "/" + "a" * 300
    assert not is_run(Path(folder))
    with pytest.raises(InvalidArgument, match=r"its run.json can't be read: .* File name too long"):
        read_run(folder)


@pytest.mark.parametrize("folder", ["", "runs/a", "../runs", "/runs/a\0b", "/runs/\na"])
def test_only_absolute_paths_are_accepted(folder: str) -> None:
    with pytest.raises(InvalidArgument, match="it must be an absolute path"):
        read_run(folder)


def test_a_bad_run_id_is_refused(tmp_path: Path) -> None:
    record = RunRecord(run_id="../x", config_json=run_config().model_dump_json(), folder=str(tmp_path))
    (tmp_path / "run.json").write_text(record.model_dump_json())
    with pytest.raises(InvalidArgument, match=r"its run id is '\.\./x'"):
        read_run(str(tmp_path))


def test_other_prompts_are_refused_or_begun_anew(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"

    def write(order: list[int]) -> None:
        prompts.write_text(
            "".join(json.dumps({"prompt": f"{one} + 1?", "answer": str(one + 1)}) + "\n" for one in order)
        )

    write(list(range(40)))
    config = RunConfig.model_validate(
        {
            "run": {"steps": 9, "folder": str(tmp_path)},
            "model": {"path": str(make_tiny_model(tmp_path / "tiny"))},
            "data": {"source": "jsonl", "path": str(prompts)},
            "reward": {"name": "addition"},
        }
    )
    train = load_data(config).train
    folder = tmp_path / "run"
    folder.mkdir()
    record = RunRecord(
        run_id="run",
        config_json=config.model_dump_json(),
        folder=str(folder),
        prompts=train.prompts,
        prompts_digest=train.digest,
    )
    (folder / "run.json").write_text(record.model_dump_json())
    write_ledger(folder, [1, 2])
    assert read_run(str(folder)).cursor.place == (0, 0)
    for order, complaint in (
        (list(range(10)), "there are 10 prompts, and the run began with 40"),
        (list(range(40))[::-1], "the 40 prompts are others than those that the run began with, or in another order"),
        ([*range(39), 50], "the 40 prompts are others"),
    ):
        write(order)
        with pytest.raises(FailedPrecondition, match=complaint) as caught:
            read_run(str(folder))
        assert "relaxd resume run --new-data" in str(caught.value)
        anew = read_run(str(folder), new_data=True)
        # Ids have epoch and position: those of epoch 0 are in the ledger.
        assert anew.cursor.place == (1, 0)
        assert (anew.record.prompts, anew.record.prompts_digest) != (train.prompts, train.digest)
    choosing = config.model_copy(
        update={"data": config.data.model_copy(update={"curriculum": CurriculumConfig(max_pass_rate=0.9)})}
    )
    (folder / "run.json").write_text(
        record.model_copy(update={"config_json": choosing.model_dump_json()}).model_dump_json()
    )
    for new_data in (False, True):
        with pytest.raises(
            FailedPrecondition, match="begin a new run with the model that this one has exported"
        ) as caught:
            read_run(str(folder), new_data=new_data)
        assert "--new-data" not in str(caught.value), "it would be refused"


def test_a_run_goes_on_that_failed_because_of_its_data(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1?"}\n{"prompt": "2 + 1?"}\n')
    config = RunConfig.model_validate(
        {
            "run": {"steps": 9, "folder": str(tmp_path)},
            "model": {"path": str(make_tiny_model(tmp_path / "tiny"))},
            "data": {"source": "jsonl", "path": str(prompts)},
            "reward": {"name": "addition"},
        }
    )
    train = load_data(config).train

    def write(outcome: Outcome) -> None:
        record = RunRecord(
            run_id="run",
            config_json=config.model_dump_json(),
            folder=str(tmp_path),
            phase=Phase.FAILED,
            outcome=outcome,
            reason="line 2 is wrong",
            prompts=train.prompts,
            prompts_digest=train.digest,
        )
        (tmp_path / "run.json").write_text(record.model_dump_json())

    write(Outcome.DATA_FAILED)
    again = read_run(str(tmp_path)).record
    assert (again.phase, again.outcome, again.reason) == (Phase.PENDING, None, "")
    prompts.write_text('{"prompt": "1 + 1?"}\n{"prompt": "2 + 2?"}\n')
    with pytest.raises(FailedPrecondition, match="relaxd resume run --new-data"):
        read_run(str(tmp_path))
    assert read_run(str(tmp_path), new_data=True).record.phase == Phase.PENDING
    write(Outcome.REPLICAS_FAILED)
    with pytest.raises(FailedPrecondition, match="only more steps let it go on"):
        read_run(str(tmp_path), new_data=True)
