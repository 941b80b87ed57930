"""A whole run whose trainer is over two hosts, which are services of one machine; one of them dies."""

import pytest

from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_books, read_summary


@pytest.mark.night
@pytest.mark.timeout(300)
def test_a_run_outlives_a_host_of_its_trainer(workplace: Workplace) -> None:
    words = ("--run.steps", "6", "--trainer.ranks", "2", "--trainer.hosts", "2", "--trainer.checkpoint.every", "2")
    run = workplace.start("run", "tiny.toml", *words, "--run-id", "hosts")
    workplace.kill_in_step(run, 3, "ranks")
    folder = workplace.folder / "runs" / "hosts"
    check_books(read_summary(folder), steps=6)
    # A replay has all ranks on one machine, and finds the same numbers.
    code, output = workplace.relaxd("replay", "hosts", "--step", "6")
    assert code == 0, output
    assert output.count("the same") == 4, output
