"""A run's checkpoints on the disk: whole or not there, damage noticed, the right ones kept."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from relaxd.run_folder import checkpoint_path, checkpoint_steps
from services.trainer.batch.step_plan import step_file_path
from services.trainer.loop.checkpoint_folders import (
    CheckpointBroken,
    describe,
    describe_all,
    keep,
    oldest_kept,
    partial_path,
    put_aside,
    read_state,
    remove_partials,
    remove_rotated,
    rotate,
    seal,
    size_of,
    verify,
    weights_path,
)
from tests.unit.trainer.loop.checkpoint_states import state


def write_partial(run_folder: Path, step: int, ranks: int = 2) -> Path:
    """What ranks leave before the folder is sealed."""
    partial = partial_path(run_folder, step, 2)
    partial.mkdir(parents=True)
    for rank in range(ranks):
        file = partial / f"rank-{rank:05d}-0.safetensors"
        file.write_bytes(bytes([rank]) * 1000)
    (partial / "common.json").write_bytes(b"common")
    return partial


def written(partial: Path) -> dict[str, Any]:
    """What the ranks tell of their files."""
    return {path.name: describe(path) for path in partial.glob("rank-*")}


def make(run_folder: Path, step: int) -> Path:
    final = checkpoint_path(run_folder, step)
    partial = write_partial(run_folder, step)
    seal(partial, final, state(step), written(partial))
    return final


def test_a_sealed_checkpoint_is_what_was_written(tmp_path: Path) -> None:
    assert checkpoint_steps(tmp_path) == []
    partial = write_partial(tmp_path, 20)
    assert checkpoint_steps(tmp_path) == []  # not yet
    final = checkpoint_path(tmp_path, 20)
    seal(partial, final, state(20), written(partial))
    assert checkpoint_steps(tmp_path) == [20]
    assert not partial.exists()
    assert read_state(final) == state(20)
    verify(final)
    # Nobody writes over one that is there.
    with pytest.raises(OSError, match="not empty"):
        seal(write_partial(tmp_path, 20), final, state(20), {})
    verify(final)


def test_checksums_of_many_files(tmp_path: Path) -> None:
    contents = {f"{number}": bytes([number]) * (number * 300_000) for number in range(20)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    counts, threads = [], set()

    def progress(count: int) -> None:
        counts.append(count)
        threads.add(threading.current_thread())

    found = describe_all(tmp_path.iterdir(), progress)
    assert found == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    assert sum(counts) == sum(map(len, contents.values()))
    assert threads == {threading.current_thread()}
    with pytest.raises(FileNotFoundError, match="missing"):
        describe_all([tmp_path / "1", tmp_path / "missing"])


def finding(path: Path, share: int) -> str:
    """What one of three says about a checkpoint."""
    try:
        verify(path, share, 3)
    except CheckpointBroken as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["rank-00000-0.safetensors", "rank-00001-0.safetensors", "common.json", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_to_any_file_is_noticed_by_one_of_those_who_share_the_reading(
    tmp_path: Path, name: str, damage: str
) -> None:
    final = make(tmp_path, 20)
    file = final / name
    content = file.read_bytes()
    if damage == "flip":
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "cut":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    found = [finding(final, share) for share in range(3)]
    assert sum(name in text for text in found) == (1 if damage == "flip" else 3)


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"files": 3}', '{"files": {"common.json": 3}}'])
def test_a_broken_manifest_is_a_broken_checkpoint(tmp_path: Path, manifest: str) -> None:
    final = make(tmp_path, 20)
    (final / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointBroken):
        verify(final)
    assert put_aside(final).name == "step-000020.broken"
    assert checkpoint_steps(tmp_path) == []


def test_the_newest_are_kept(tmp_path: Path) -> None:
    make(tmp_path, 10)
    assert rotate(tmp_path, 2) is None  # too few for the oldest to be a second resort
    make(tmp_path, 20)
    assert rotate(tmp_path, 2) == 10
    aside = put_aside(checkpoint_path(tmp_path, 20))
    make(tmp_path, 1_000_000)
    assert rotate(tmp_path, 2) == 10
    assert aside.exists()  # to be looked at, as long as something older is kept
    make(tmp_path, 1_000_010)
    assert rotate(tmp_path, 2) == oldest_kept(tmp_path, 2) == 1_000_000
    assert checkpoint_steps(tmp_path) == [1_000_010, 1_000_000]
    assert not aside.exists()
    remove_rotated(tmp_path).join()
    assert {path.name for path in checkpoint_path(tmp_path, 0).parent.iterdir()} == {"step-1000000", "step-1000010"}


def test_a_checkpoint_taken_by_hand_stays(tmp_path: Path) -> None:
    keep(make(tmp_path, 10))
    for step in (20, 30, 40):
        make(tmp_path, step)
    assert rotate(tmp_path, 2) == 30  # the step files since the second newest
    assert checkpoint_steps(tmp_path) == [40, 30, 10]
    verify(checkpoint_path(tmp_path, 10))
    make(tmp_path, 50)
    keep(checkpoint_path(tmp_path, 40))
    assert rotate(tmp_path, 1) == 50
    assert checkpoint_steps(tmp_path) == [50, 40, 10]


def test_the_oldest_make_room_within_a_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(make(tmp_path, 10))
    one = size_of(tmp_path, 10)
    assert rotate(tmp_path, 3, max_bytes=4 * one + 500) is None
    make(tmp_path, 20)
    assert rotate(tmp_path, 3, max_bytes=4 * one + 500) is None
    make(tmp_path, 30)
    # All three, and the next one, have room; more don't.
    assert rotate(tmp_path, 3, max_bytes=4 * one + 500) == 20
    assert checkpoint_steps(tmp_path) == [30, 20, 10]
    assert not caplog.messages
    make(tmp_path, 40)
    assert rotate(tmp_path, 9, max_bytes=4 * one + 500) == 30
    assert checkpoint_steps(tmp_path) == [40, 30, 10]
    assert caplog.messages == [
        "the checkpoints of steps 20 are removed, though trainer.checkpoint.keep is 9: with them, and the next one, "
        f"there would be more than trainer.checkpoint.max_bytes = {4 * one + 500}"
    ]
    caplog.clear()
    # The newest stays whatever the limit, and so does the one that was taken by hand.
    assert rotate(tmp_path, 9, max_bytes=one) == 40
    assert checkpoint_steps(tmp_path) == [40, 10]
    assert f"bytes more than trainer.checkpoint.max_bytes = {one}: the newest one stays" in caplog.messages[-1]


def test_what_earlier_trainers_did_not_finish_is_removed(tmp_path: Path) -> None:
    checkpoint, complete = write_partial(tmp_path, 20), make(tmp_path, 10)
    step = step_file_path(tmp_path, 21)
    step.parent.mkdir()
    reference = weights_path(tmp_path, "step-000020.2")
    unfinished = [checkpoint, step.with_name(f"{step.name}.2.partial"), reference.with_name("step-000020.2.partial")]
    unfinished[1].touch()
    unfinished[2].mkdir(parents=True)
    others = [complete, step, reference, step.with_name("my.partial"), reference.with_name("step-000020.new.partial")]
    for path in others[1:]:
        path.touch()
    remove_partials(tmp_path, before_term=2)
    assert all(path.exists() for path in (*unfinished, *others))
    remove_partials(tmp_path, before_term=3)
    assert [path.name for path in unfinished if path.exists()] == []
    assert all(path.exists() for path in others)
