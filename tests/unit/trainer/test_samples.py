"""Files with all samples of a step."""

import logging
import os
from pathlib import Path

import pytest

from relaxd.run_folder import all_samples_file, read_all_samples
from services.trainer.loop import samples
from services.trainer.loop.samples import SampleFiles, all_samples, shown_samples
from tests.unit.trainer.sampled_groups import SAMPLES, make_group


def kept(folder: Path, steps: range) -> list[int]:
    return [step for step in steps if all_samples_file(folder, step).exists()]


def test_a_file_has_every_sample_in_order(tmp_path: Path) -> None:
    groups = [make_group(i, source, samples) for i, (source, samples) in enumerate(SAMPLES)]
    files = SampleFiles(tmp_path, 0)
    files.write(3, all_samples(groups, 3))
    assert files.await_written()
    found = list(read_all_samples(tmp_path, 3))
    assert [(one["group_id"], one["sample"]) for one in found] == [
        (f"g{number}", index) for number, (_, samples) in enumerate(SAMPLES) for index in range(len(samples))
    ]
    assert [(one["reward"], one["length"], one["finish_reason"], one["response"]) for one in found] == [
        sample for _, samples in SAMPLES for sample in samples
    ]
    assert [one.get("source") for one in found] == ["math"] * 3 + ["a b/c"] * 2 + [None] * 2
    assert found[0]["reward_parts"] == {"max": 9.0, "style": 0.5}
    (first,) = shown_samples(groups, 3, 1)
    tokens = first.pop("tokens")
    assert first.items() <= found[0].items()
    own = slice(0, first["length"])
    assert tokens["ids"] == groups[0].columns["tokens"][own].tolist()
    assert tokens["trained"] == [1]  # all of them
    assert tokens["engine_logprobs"] == pytest.approx(groups[0].columns["rollout_logprobs"][own].tolist(), rel=1e-3)
    assert list(read_all_samples(tmp_path, 4)) == []


def test_steps_are_replaced_and_old_ones_removed(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, kept_steps=2)
    for step in (1, 2, 3, 4, 4):
        files.write(step, [{"step": step}] * 200)
    files.write(5, [{"step": 5, "response": "\ud800 ü"}])
    assert files.await_written()
    assert kept(tmp_path, range(7)) == [4, 5]
    assert len(list(read_all_samples(tmp_path, 4))) == 200
    assert [path.name for path in (tmp_path / "samples").iterdir() if path.name.endswith(".partial")] == []


def test_a_disk_that_refuses_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples").write_text("no folder")
    files = SampleFiles(tmp_path, 0)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            files.write(step, [{"step": step}])
        assert files.await_written()
    assert [record.message.split(":")[0] for record in caplog.records] == ["the samples of step 1 are not kept"]
    (tmp_path / "samples").unlink()
    files.write(3, [{"step": 3}])
    assert files.await_written()
    assert kept(tmp_path, range(5)) == [3]


def test_a_disk_that_hangs_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(samples, "PATIENCE_SECONDS", 0.05)
    (tmp_path / "samples").mkdir()
    pipe = tmp_path / "samples" / "step-000001.jsonl.gz.partial"
    os.mkfifo(pipe)  # nobody reads it: opening it hangs
    files = SampleFiles(tmp_path, 0)
    with caplog.at_level(logging.WARNING):
        files.write(1, [{"step": 1}])
        files.write(2, [{"step": 2}])
    assert [record.message.split(":")[0] for record in caplog.records] == ["the samples of step 2 are not kept"]
    with pipe.open("rb") as reader:  # the disk works again
        reader.read()
    assert files.await_written(5.0)
    files.write(3, [{"step": 3}])
    assert files.await_written()
    assert kept(tmp_path, range(2, 5)) == [3]
