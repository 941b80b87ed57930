"""A snapshot is copied beside training: it holds what was, and what it still needs doesn't change."""

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.batch.micro_batch import pack
from services.trainer.learner import checkpoint_files
from services.trainer.learner.learner import Learner
from services.trainer.learner.snapshot import Snapshot
from tests.integration.trainer.trainer_worlds import Job, make_learner, make_model, make_samples

PATIENCE = 120.0


@pytest.fixture
def learner(tmp_path: Path, alone: None) -> Learner:
    made = make_learner(Job(make_model(tmp_path / "qwen3", "qwen3", tied=True)))
    step(made, 1)
    return made


def step(learner: Learner, seed: int) -> None:
    learner.accumulate([pack(make_samples(6, seed=seed))])
    learner.finish(6.0)


def optimizer_state(learner: Learner) -> torch.Tensor:
    states = [state for one in learner._optimizer.chained_optimizers for state in one.optimizer.state.values()]
    return torch.cat([state[key].flatten() for state in states for key in ("exp_avg", "exp_avg_sq")]).clone()


def test_the_next_step_goes_on_until_its_weights_would_change(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    copy = checkpoint_files._Stage.copy

    def slow(self: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        copy(self, target, source)

    monkeypatch.setattr(checkpoint_files._Stage, "copy", slow)
    before, moments = learner.checksum(), optimizer_state(learner)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    snapshot = learner.snapshot(folder)
    assert begun.wait(PATIENCE)
    learner.accumulate([pack(make_samples(6, seed=2))])
    finishing = threading.Thread(target=learner.finish, args=(6.0,))
    finishing.start()
    finishing.join(0.5)
    assert finishing.is_alive()  # it waits for the copies
    assert learner.checksum() == before
    go_on.set()
    finishing.join(PATIENCE)
    assert not finishing.is_alive()
    assert learner.checksum() != before
    snapshot.write()
    learner.restore(folder, 1, same_layout=True)
    assert learner.checksum() == before
    assert torch.equal(optimizer_state(learner), moments)


def test_a_learner_that_has_trained_further_goes_back_with_its_schedule(learner: Learner, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    snapshot = learner.snapshot(folder)
    snapshot.write()

    def go_on() -> tuple[list[float], list[int]]:
        rates, checksums = [], []
        for seed in (2, 3):
            learner.accumulate([pack(make_samples(6, seed=seed))])
            rates.append(learner.finish(6.0).lr)
            checksums.append(learner.checksum())
        return rates, checksums

    first = go_on()
    learner.restore(folder, 1, same_layout=True)
    assert go_on() == first
    assert learner._schedule.num_steps == 3


@pytest.fixture
def three_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "FILE_BYTES", 1 << 12)
    monkeypatch.setattr(checkpoint_files, "MAX_FILES", 3)


def test_a_large_rank_writes_several_files(learner: Learner, tmp_path: Path, three_files: None) -> None:
    before, moments = learner.checksum(), optimizer_state(learner)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    snapshot = learner.snapshot(folder)
    step(learner, 2)
    snapshot.write()
    sizes = [path.stat().st_size for path in folder.glob("rank-00000-*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) < 1.5 * min(sizes)
    learner.restore(folder, 1, same_layout=True)
    assert learner.checksum() == before
    assert torch.equal(optimizer_state(learner), moments)


def places(snapshot: Snapshot) -> list[int]:
    return [memory.data_ptr() for _, memory in snapshot._files._files.values()]


def test_a_snapshot_uses_memory_of_the_one_before(learner: Learner, tmp_path: Path, three_files: None) -> None:
    expected, taken = {}, []
    for number in range(3):
        step(learner, 2 + number)
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        torch.rand(number + 1)  # other states of the generators
        expected[folder] = learner.checksum(), optimizer_state(learner), torch.get_rng_state()
        snapshot = learner.snapshot(folder)
        snapshot.write()
        taken.append(places(snapshot))
    assert taken[0] == taken[1] == taken[2]
    for folder, (checksum, moments, generator) in expected.items():
        learner.restore(folder, 1, same_layout=True)
        assert learner.checksum() == checksum
        assert torch.equal(optimizer_state(learner), moments)
        assert torch.equal(torch.get_rng_state(), generator)


def test_the_first_snapshot_uses_prepared_memory_once_it_is_there(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    touch = checkpoint_files._touch

    def slow(tensors: list[torch.Tensor]) -> None:
        assert go_on.wait(PATIENCE)
        touch(tensors)

    monkeypatch.setattr(checkpoint_files, "_touch", slow)
    learner.prepare_snapshots()
    prepared = [memory.data_ptr() for memory in learner._kept.memory._tensors]
    checksum, folder = learner.checksum(), tmp_path / "checkpoint"
    folder.mkdir()
    snapshot = learner.snapshot(folder)
    assert places(snapshot) == prepared
    assert not snapshot.copies.wait(0.3)  # what is copied there before would be overwritten
    go_on.set()
    snapshot.write()
    step(learner, 2)
    assert learner.checksum() != checksum
    learner.restore(folder, 1, same_layout=True)
    assert learner.checksum() == checksum


def test_a_snapshot_leaves_the_one_before_alone_until_it_is_written(learner: Learner, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    snapshots, checksums = [], []
    for folder in folders:
        folder.mkdir()
        checksums.append(learner.checksum())
        snapshots.append(learner.snapshot(folder))
        step(learner, 2)
    assert not set(places(snapshots[0])) & set(places(snapshots[1]))
    for snapshot, folder, checksum in zip(snapshots, folders, checksums, strict=True):
        snapshot.write()
        learner.restore(folder, 1, same_layout=True)
        assert learner.checksum() == checksum


def test_a_file_that_cannot_be_written_fails_the_checkpoint(
    learner: Learner, tmp_path: Path, three_files: None
) -> None:
    (tmp_path / "rank-00000-1.safetensors").mkdir()
    with pytest.raises(FileExistsError, match=r"rank-00000-1\.safetensors"):
        learner.snapshot(tmp_path).write()


def test_checkpoints_leave_no_garbage(learner: Learner, tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # Megatron's own search must do
    try:
        objects = []
        for number in range(4):
            folder = tmp_path / f"checkpoint-{number}"
            folder.mkdir()
            snapshot = learner.snapshot(folder)
            snapshot.write()
            objects.append(len(gc.get_objects()))
    finally:
        gc.enable()
    assert objects[-1] - objects[1] < 10, objects  # without the search each leaves 32, and with more ranks hundreds


def test_copies_that_fail_hold_nothing_up_and_say_so_where_they_are_needed(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(checkpoint_files._Stage, "copy", broken)
    (tmp_path / "checkpoint").mkdir()
    snapshot = learner.snapshot(tmp_path / "checkpoint")
    step(learner, 2)
    assert learner.step == 2
    with pytest.raises(MemoryError, match="no room for a copy"):
        snapshot.write()


def test_a_copy_that_takes_too_long_is_an_error(learner: Learner) -> None:
    copies = checkpoint_files.HostCopies(torch.device("cpu"), checkpoint_files.HostMemory())
    with pytest.raises(TimeoutError, match=r"took longer than 0.01 s"):
        copies.wait_or_raise(0.01)
