"""A broadcast and the optimizer take turns, and neither waits for ever."""

import threading
from pathlib import Path

import pytest

from relaxd.weights import WEIGHTS_CHANGED
from services.trainer.loop.weight_read_lock import HoldRefused, WeightReadLock
from services.trainer.service.server import export_folder
from tests.kit.waiting import wait_until

UNKNOWN = "FAILED_PRECONDITION"
"""Reason of an error without a specific one: the name of its status."""


def test_the_optimizer_waits_for_the_broadcast_to_end() -> None:
    weights = WeightReadLock(term=2)
    weights.publish(4)
    hold = weights.acquire(2, 4, 30.0)
    order = []

    def change() -> None:
        weights.begin_change("step 5", lambda: order.append("tick"), 0.01)
        order.append("changed")

    optimizer = threading.Thread(target=change)
    optimizer.start()
    wait_until(lambda: "tick" in order, "the optimizer waits", 5)
    assert "changed" not in order
    assert weights.release(hold)
    optimizer.join(5)
    assert order[-1] == "changed"


def test_a_broadcast_that_is_late_loses_its_hold() -> None:
    weights = WeightReadLock(term=1)
    weights.publish(0)
    hold = weights.acquire(1, 0, 0.05)
    assert 0.04 < weights.begin_change("step 1", lambda: None, 0.01) < 1.0
    weights.publish(1)
    assert not weights.release(hold)
    assert weights.release(weights.acquire(1, 1, 5.0))


def test_only_the_weights_that_are_there_are_held() -> None:
    weights = WeightReadLock(term=1)
    with pytest.raises(HoldRefused, match="there are none"):
        weights.acquire(1, 0, 1.0)
    weights.publish(3)
    for term, version, reason in ((1, 2, WEIGHTS_CHANGED), (1, 4, UNKNOWN), (2, 3, UNKNOWN)):
        with pytest.raises(HoldRefused, match=r"\(1, 3\)") as refusal:
            weights.acquire(term, version, 1.0)
        assert refusal.value.reason == reason
    weights.begin_change("step 4", lambda: None, 0.01)
    with pytest.raises(HoldRefused, match=r"the trainer is changing them \(step 4\)") as refusal:
        weights.acquire(1, 3, 1.0)
    assert refusal.value.reason == WEIGHTS_CHANGED


def test_exports_stay_below_the_run_and_replace_only_models(tmp_path: Path) -> None:
    assert export_folder(tmp_path, "model") == (tmp_path / "model").resolve()
    assert export_folder(tmp_path, "exports/last") == (tmp_path / "exports/last").resolve()
    (tmp_path / "steps").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to("/tmp")
    export_folder(tmp_path, "model")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "self").symlink_to(tmp_path)
    refused = ("", ".", "./", "..", "../x", "a/../../x", "/tmp/x", "steps", "steps/x", "checkpoints/x", "link/x")
    for folder in (*refused, "self", "a\0b", "a\nb", "a" * 300, "a" * 201, "x/" + "ä" * 101):
        with pytest.raises(ValueError, match="folder is"):
            export_folder(tmp_path, folder)
