"""Ctrl-C, then every process of a run is killed, twice; the second time Redis's data is gone too. The run goes on."""

import json
import shutil
import signal
from pathlib import Path
from subprocess import Popen

import pytest
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relaxd.local.state_folder import StateFolder
from tests.e2e.conftest import Workplace
from tests.e2e.interrupted_runs import kill_everything_at
from tests.kit.finished_runs import check_books, read_summary

SETTINGS = (
    *("--run.steps", "9", "--board.lease_seconds", "3", "--eval.prompts", "0"),
    *("--trainer.checkpoint.every", "2", "--trainer.checkpoint.keep_step_files", "always"),
    *("--tracking.trackers", '["tensorboard"]'),
)


def interrupt_at(process: "Popen[str]", step: int) -> str:
    """Ctrl-C in a command that has printed a step. Returns what it printed then."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {step}/9"):
            break
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130, output
    return str(output)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_after_ctrl_c_and_after_everything_was_killed(workplace: Workplace, tiny_model: Path) -> None:
    state, steps = StateFolder(workplace.folder / ".relaxd"), iter((4, 6))
    folder, redis_data = workplace.folder / "runs" / "r", state.redis_data_of("r")
    output = interrupt_at(workplace.start("run", "tiny.toml", "--run-id", "r", *SETTINGS), 2)
    assert "run r has not ended: relaxd resume r continues it" in output
    assert redis_data.is_dir()
    # Neither another run of that name nor a resume that can't be done costs it anything.
    code, output = workplace.relaxd("run", "tiny.toml", "--run-id", "r", *SETTINGS)
    assert code == 1
    assert "choose another run id" in output
    assert redis_data.is_dir()
    code, output = workplace.relaxd("resume", "r", RELAXD_TOKEN_FILE="no/such/file")
    assert code == 1, output
    assert redis_data.is_dir()

    for redis_is_lost in (False, True):
        lines = kill_everything_at(workplace.start("resume", "r"), state, steps)
        assert "is restored from" not in "".join(lines)  # it goes on in its Redis
        if redis_is_lost:
            shutil.rmtree(redis_data)
    code, output = workplace.relaxd("resume", "r", timeout=240)
    assert code == 0, output
    assert "is restored from" in output
    assert not redis_data.exists()
    check_books(read_summary(folder), steps=9)

    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == list(range(1, 10))
    trained = [group for entry in entries for group in entry["plan"]["groups"]]
    prompts = {group.partition("~")[0] for group in trained}
    assert len(prompts) == len(trained)  # no prompt twice
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))
    log = "".join(path.read_text() for path in (folder / "logs").glob("trainer*.log"))
    assert "is loaded" in log

    # What was recorded can be repeated: the last step from the checkpoint before it, and one before the deaths from the
    # initial model. Both depend on how far the trainer was ahead of the output when it died: a step file counts without
    # its commit, but has no figures to compare.
    before, last = sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
    assert last == 9
    newest = max(line["step"] for line in lines if "loss" in line)
    code, output = workplace.relaxd("replay", "r", "--step", str(newest))
    assert code == 0, output
    assert (f"from the checkpoint of step {before}" if before < newest else "from the initial model") in output
    assert output.count("the same") == 4, output
    # A number that isn't what the step gives shows, beside the one that is repeated.
    recorded = lines[4] | {"loss": lines[4]["loss"] + 1.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (*lines[:4], recorded, *lines[5:])))
    code, output = workplace.relaxd("replay", "r", "--step", "5")
    assert (code, output.count("DIFFERENT"), output.count("the same")) == (1, 1, 3), output
    assert (f"from the checkpoint of step {before}" if before < 5 else "from the initial model") in output
    assert f"{lines[4]['loss']:.17g}" in output
    (folder / "steps" / "step-000005.safetensors").unlink()
    code, output = workplace.relaxd("replay", "r", "--step", "5")
    assert code == 1
    assert "step-000005.safetensors is missing" in output

    code, output = workplace.relaxd("export", "r", "exported")
    assert code == 0, output
    assert "step 9" in output
    exported = load_file(workplace.folder / "exported" / "model.safetensors")
    assert exported.keys() == load_file(tiny_model / "model.safetensors").keys()
    code, output = workplace.relaxd("export", "r", "exported", "--step", "1")
    assert code == 1
    assert f"no intact checkpoint of step 1; available steps: {before}, 9" in output
    code, output = workplace.relaxd("resume", "r")
    assert code == 1
    assert "run r has ended (completed): 9 of 9 steps are done" in output

    code, output = workplace.relaxd("resume", "r", "--run.steps", "11", timeout=240)
    assert code == 0, output
    check_books(read_summary(folder), steps=11)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 12))
    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in ("reward_mean", "loss"):
        curve = [(event.step, event.value) for event in read.Scalars(f"train/{name}")]
        assert curve == [(line["step"], pytest.approx(line[name])) for line in lines if name in line]
