"""When evaluations that no longer improve end a run."""

from relaxd.config.run import StopEarlyConfig
from services.coordinator.runs.ending import reason_to_stop_early
from services.coordinator.state.records import Evaluation
from tests.kit.cases import each

METRIC = "eval.held_out.reward"


@each(
    ("settings", "values", "since", "reason"),
    [
        ({"patience": 2}, [0.1, 0.2, 0.2, 0.15], 0, "in 2 evaluations, up to step 4, since 0.2 at step 2"),
        ({"patience": 2}, [0.1, 0.2, 0.15, 0.3], 0, ""),
        ({"patience": 2}, [0.1, 0.2, 0.15, 0.1, 0.9], 0, "up to step 4, since 0.2 at step 2"),  # it stays
        ({"patience": 1}, [0.5], 0, ""),
        ({"patience": 1}, [], 0, ""),
        ({"patience": 2, "min_delta": 0.1}, [0.1, 0.15, 0.19], 0, "not improved by more than 0.1 in 2 evaluations"),
        ({"patience": 2, "min_delta": 0.1}, [0.1, 0.15, 0.25], 0, ""),
        ({"patience": 2, "metric": "-" + METRIC}, [0.1, 0.2, 0.3], 0, "since 0.1 at step 1"),
        ({"patience": 2}, [0.3, 0.2, 0.1], 3, ""),  # extended after step 3
        ({"patience": 2}, [0.3, 0.2, 0.1, 0.1, 0.2], 3, "in 2 evaluations, up to step 5, since 0.3 at step 1"),
        ({"metric": ""}, [0.3, 0.2, 0.1, 0.1, 0.2], 0, ""),
    ],
)
def test_run_ends_after_patience_is_exhausted(
    settings: dict[str, float | str], values: list[float], since: int, reason: str
) -> None:
    evaluations = [Evaluation(step=step, metrics={"eval_reward": value}) for step, value in enumerate(values, 1)]
    initial = Evaluation(step=0, metrics={"eval_reward": 0.9})
    given = StopEarlyConfig.model_validate({"metric": METRIC} | settings)
    found = reason_to_stop_early(given, [initial, *evaluations], since)
    assert reason in found
    assert bool(reason) == bool(found)
