"""The metrics of a step from those of its updates."""

import math

import pytest

from services.trainer.learner.update import UpdateStats, step_metrics


def update(loss: float, tokens: int = 10, *, skipped: bool = False, lr: float = 0.1, **metrics: float) -> UpdateStats:
    return UpdateStats(step=3, loss=loss, grad_norm=2 * loss, skipped=skipped, lr=lr, tokens=tokens, metrics=metrics)


def test_a_step_of_one_update_has_its_numbers() -> None:
    assert step_metrics([update(0.3, kl=0.7, drift_max=2.0)], 1) == {
        "loss": 0.3, "grad_norm": 0.6, "lr": 0.1, "kl": 0.7, "drift_max": 2.0, "skipped_updates": 0.0,
    }  # fmt: skip


def test_several_updates_are_averaged_over_tokens_and_by_epoch() -> None:
    updates = [
        update(1.0, 10, clip_fraction=0.0, drift_max=1.0),
        update(3.0, 30, clip_fraction=0.4, drift_max=4.0, only_here=5.0),
        update(5.0, 10, clip_fraction=0.2, drift_max=3.0),
        update(7.0, 30, clip_fraction=0.6, drift_max=2.0, lr=0.2),
    ]
    found = step_metrics(updates, 2)
    assert (found["loss"], found["grad_norm"], found["lr"]) == (4.0, 8.0, 0.2)
    assert found["clip_fraction"] == pytest.approx((0.4 * 30 + 0.2 * 10 + 0.6 * 30) / 80)
    assert (found["drift_max"], found["only_here"]) == (4.0, 5.0)
    assert (found["loss_epoch_1"], found["loss_epoch_2"]) == (2.0, 6.0)
    assert found["clip_fraction_epoch_1"] == pytest.approx(0.3)
    assert found["clip_fraction_epoch_2"] == pytest.approx(0.5)
    assert "drift_max_epoch_1" not in found
    assert not any("epoch" in name for name in step_metrics(updates, 1))


def test_skipped_updates_count_only_where_nothing_was_applied() -> None:
    bad = update(math.nan, skipped=True, kl=math.inf)
    found = step_metrics([update(1.0, kl=0.5), bad, bad, update(2.0, kl=1.5)], 2)
    assert (found["loss"], found["kl"], found["skipped_updates"]) == (1.5, 1.0, 2.0)
    assert (found["loss_epoch_1"], found["loss_epoch_2"]) == (1.0, 2.0)
    found = step_metrics([bad, bad], 1)
    assert math.isnan(found["loss"])
    assert (found["kl"], found["skipped_updates"]) == (math.inf, 2.0)
