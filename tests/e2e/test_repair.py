"""A person steps in: repairs a reward after Ctrl-C, stops the services in mid-run. The run goes on where it was."""

import json
import os
import signal
from pathlib import Path

import pytest

from relaxd.local.state_folder import StateFolder
from tests.e2e.conftest import Workplace
from tests.e2e.interrupted_runs import saved_step, until
from tests.kit.finished_runs import check_books, read_summary

REWARD = """
from itertools import count
from pathlib import Path

samples = count()

def score(sample):
    if next(samples) >= 32 and not Path("repaired").exists():
        raise KeyError("verdict")
    return len(set(sample.response)) / 12
"""
"""It breaks by itself after eight groups: a test that broke it might come when the run has ended."""
MAX_DROPS = 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_after_its_reward_was_repaired(workplace: Workplace) -> None:
    place, folder = workplace.folder, workplace.folder / "runs" / "r"
    (place / "flaky.py").write_text(REWARD.replace('"repaired"', repr(str(place / "repaired"))))
    settings = ("--run.steps", "8", "--reward.name", "flaky:score", "--eval.prompts", "0")
    drops = ("--board.max_consecutive_drops", str(MAX_DROPS), "--algorithm.drop_zero_variance", "false")
    process = workplace.start("run", "tiny.toml", "--run-id", "r", *settings, *drops)
    assert process.stdout is not None
    paused = until(process.stdout, "run r is paused")
    log = folder.resolve() / "logs" / "reward.log"
    assert "KeyError: 'verdict' (flaky.py:9, in score); its traceback is in " + str(log) in paused
    assert "once repaired: relaxd resume r" in paused
    assert log.read_text().count("in score\n        raise KeyError") == 1  # not once for each group
    code, output = workplace.relaxd("pause", "--reason", "until it is repaired")
    assert (code, output) == (0, "run r is paused: until it is repaired\n")
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=180)
    assert process.returncode == 130, rest
    assert saved_step(rest) >= 2
    assert StateFolder(place / ".relaxd").redis_data_of("r").is_dir()
    code, output = workplace.relaxd("why")
    assert (code, "it is paused: until it is repaired" in output) == (0, True), output

    (place / "repaired").touch()
    code, output = workplace.relaxd("resume", timeout=300)
    assert code == 0, output
    assert "is restored from" not in output  # it went on in its Redis
    assert "dropped as" not in output.partition("\nstep")[0]  # the reward is repaired
    summary = read_summary(folder)
    check_books(summary, steps=8)
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    again = [group for entry in entries for group in entry["plan"]["groups"] if "~" in group]
    assert again  # prompts whose reward had failed
    assert len(again) <= summary["dropped_by_reason"]["reward_failed"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_services_that_are_stopped_in_mid_run_leave_a_checkpoint(workplace: Workplace) -> None:
    place, folder = workplace.folder, workplace.folder / "runs" / "r"
    code, output = workplace.relaxd("up", "--port", "0")
    assert code == 0, output
    words = ("--run.steps", "4000", "--eval.prompts", "0", "--trainer.checkpoint.every", "1000")
    process = workplace.start("run", "tiny.toml", "--run-id", "r", *words)
    assert process.stdout is not None
    until(process.stdout, "^step +3/")
    watch = workplace.start("watch")
    assert watch.stdout is not None
    until(watch.stdout, "^step")
    os.kill(watch.pid, signal.SIGTERM)
    assert watch.wait(timeout=120) == 128 + signal.SIGTERM

    code, output = workplace.relaxd("down")
    assert code == 0, output
    step = saved_step(output)
    assert step >= 3
    assert (folder / "checkpoints" / f"step-{step:06d}" / "manifest.json").is_file()
    assert "run r has not ended: relaxd up continues it" in output
    rest, _ = process.communicate(timeout=120)
    assert (process.returncode, "the services here are down" in rest) == (1, True), rest

    # The Redis of `relaxd up` has the run: there is no second copy.
    again = workplace.start("resume", "r")
    assert again.stdout is not None
    until(again.stdout, "^step")
    code, output = workplace.relaxd("stop")
    assert code == 0, output
    rest, _ = again.communicate(timeout=180)
    assert again.returncode == 0, rest
    assert sorted(path.name for path in (place / ".relaxd").glob("redis*") if path.is_dir()) == ["redis"]
    log = (place / ".relaxd" / "logs" / "trainer.log").read_text()
    assert f"checkpoint step-{step:06d} is loaded" in log
    check_books(summary := read_summary(folder), steps=summary["steps"])
    assert Path(folder / "model").is_dir()
