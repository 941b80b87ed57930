"""Series of metrics.jsonl against all of its lines."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from relaxd.client.metric_series import MAX_VALUES, POINTS_OF_ALL, read_series, rows
from relaxd.v1 import coordinator_pb2 as pb

STEPS = [step for step in range(2000) if step not in range(700, 750)]


def line(step: int) -> dict[str, Any]:
    values: dict[str, Any] = {"step": step}
    if step:
        values |= {"loss": 1 / step, "long name": "x" * (step % 97), "replicas": {"loss": {"r": 1}}}
    if step % 130 == 0:
        values |= {"eval_reward": step / 2, "eval/set/reward": 1.0}
    return values | ({"grad_norm": None} if step % 2 else {"grad_norm": step})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    text = "".join(json.dumps(line(step)) + "\n" for step in STEPS)
    (folder / "metrics.jsonl").write_text(text + '{"step": 2000, "lo')
    return folder


def series_of(folder: Path, **fields: Any) -> dict[str, dict[int, float]]:
    found = read_series(folder, pb.GetMetricsRequest(**fields))
    return {one.name: dict(zip(one.steps, one.values, strict=True)) for one in found}


@pytest.mark.parametrize(
    "bounds", [(0, 0), (1, 1), (5, 9), (699, 751), (710, 740), (750, 750), (1990, 5000), (3000, 0)]
)
def test_a_range_has_every_step_of_it(folder: Path, bounds: tuple[int, int]) -> None:
    first, last = bounds
    wanted = [step for step in STEPS if first <= step <= (last or 10**9)]
    found = series_of(
        folder, first_step=first, last_step=last, names=["loss", "grad_norm", "eval_reward"], max_points=9999
    )
    expected = {
        name: {step: line(step)[name] for step in wanted if line(step).get(name) is not None}
        for name in ("loss", "grad_norm", "eval_reward")
    }
    assert found == {name: values for name, values in expected.items() if values}


@pytest.mark.parametrize("points", [1, 2, 3, 7, 64, 1000, 1949, 1950])
def test_many_steps_are_thinned_evenly(folder: Path, points: int) -> None:
    found = series_of(folder, names=["loss", "eval_reward"], max_points=points)
    steps = list(found["loss"])
    assert points / 2 <= len(steps) <= points
    assert steps == sorted(set(steps))
    assert steps[-1] == 1999
    assert points == 1 or steps[0] == 1
    assert all(value == 1 / step for step, value in found["loss"].items())
    gaps = [STEPS.index(after) - STEPS.index(before) for before, after in itertools.pairwise(steps[:-1])]
    assert len(set(gaps)) <= 1, "all but the last are at the same distance"
    if points >= 16:
        assert list(found["eval_reward"]) == list(range(0, 2000, 130)), "a rare metric isn't lost among others"


def test_without_names_all_are_there(folder: Path) -> None:
    found = series_of(folder)
    assert set(found) == {"loss", "grad_norm", "eval_reward", "eval/set/reward"}
    assert POINTS_OF_ALL / 2 <= len(found["loss"]) <= POINTS_OF_ALL
    assert list(found["eval_reward"]) == list(range(0, 2000, 130))


def test_rows_have_the_values_of_a_step(folder: Path) -> None:
    found = rows(read_series(folder, pb.GetMetricsRequest(first_step=129, last_step=131)))
    assert found == [
        {"step": 129, "loss": 1 / 129},
        {"step": 130, "loss": 1 / 130, "grad_norm": 130, "eval_reward": 65.0, "eval/set/reward": 1.0},
        {"step": 131, "loss": 1 / 131},
    ]


def test_no_file_has_no_series(tmp_path: Path) -> None:
    assert series_of(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_text("")
    assert series_of(tmp_path, names=["loss"]) == {}


def test_an_answer_has_a_bounded_size(tmp_path: Path) -> None:
    names = [f"metric_{number}" for number in range(100)]
    text = "".join(json.dumps({"step": step, **dict.fromkeys(names, 0.5)}) + "\n" for step in range(1, 4000))
    (tmp_path / "metrics.jsonl").write_text(text)
    answer = pb.GetMetricsResponse(series=read_series(tmp_path, pb.GetMetricsRequest(names=names, max_points=10_000)))
    assert sum(len(one.steps) for one in answer.series) <= MAX_VALUES
    assert answer.ByteSize() < 4_000_000
