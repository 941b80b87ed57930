"""A sweep of two runs, of which the first was done before."""

import pytest

from tests.e2e.conftest import Workplace

SWEEP = """
base = "tiny.toml"
name = "lr"
metric = "eval.held_out.reward"

[settings]
run.steps = 1

[grid]
trainer.optimizer.lr = [{values}]
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_does_what_is_not_done_and_compares_all(workplace: Workplace) -> None:
    file = workplace.folder / "sweep.toml"
    file.write_text(SWEEP.format(values="1e-3"))
    code, output = workplace.relaxd("sweep", "sweep.toml")
    assert code == 0, output
    (first,) = (path.name for path in (workplace.folder / "runs").glob("lr-*"))
    file.write_text(SWEEP.format(values="1e-3, 1e-4"))
    code, output = workplace.relaxd("sweep", "sweep.toml")
    assert code == 0, output
    assert "run 2 of 2: trainer.optimizer.lr = 0.0001" in output
    assert "run 1 of 2" not in output
    names = {path.name for path in (workplace.folder / "runs").glob("lr-*")}
    assert len(names) == 2
    table = (workplace.folder / "runs" / "lr.sweep" / "sweep.csv").read_text().splitlines()
    assert table[0].startswith("run,trainer.optimizer.lr,state,steps,reward,best reward,at step,last reward")
    assert {line.split(",")[0] for line in table[1:]} == names
    assert first in names
    assert all(line.split(",")[2:4] == ["completed", "1"] for line in table[1:])
    assert (workplace.folder / "runs" / "lr.sweep" / "sweep.png").is_file()
