"""The record of a step on its ways: metrics.jsonl, GetMetrics, TensorBoard, and all samples."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

import relaxd
from relaxd.run_folder import closed_groups, read_all_samples
from relaxd.v1 import coordinator_pb2 as pb
from tests.e2e.conftest import CONFIG
from tests.kit.waiting import wait_until

STEPS = 3
NAMES = (
    *("reward_median", "reward_std", "right_share", "repetition_share", "response_length_max", "pass_at_1"),
    *("pass_at_4", "scored_groups", "sync_bytes", "sync_receive_seconds", "train_tflops_per_gpu"),
    *("user/bytes", "user/calls"),
)
ASKED = pb.GetMetricsRequest(names=["reward_mean"], first_step=1, last_step=1)


def right_if_even(sample: Any) -> float:
    import time
    from pathlib import Path

    from relaxd import log_metric

    while sample.response != sample.answer and not Path("heard").exists():  # a trial has the answer
        time.sleep(0.01)
    data = sample.response.encode()
    log_metric("bytes", len(data), "max")
    log_metric("calls", 1, "sum")
    return float(len(data) % 2 == 0)


@pytest.mark.slow
def test_every_way_has_the_same_numbers(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(CONFIG.format(model=tiny_model, steps=STEPS))
    settings = {"eval.prompts": 0, "telemetry.all_samples": True, "tracking.trackers": ["tensorboard"]}
    settings["reward.timeout_seconds"] = 120
    with relaxd.run(relaxd.configure("tiny.toml", settings), reward=right_if_even, run_id="record") as run:
        with run._client() as client:
            heard = lambda: any("engine_prompted_tokens" in one.status.gauges for one in client.replicas())  # noqa: E731
            wait_until(heard, "a heartbeat of an engine that has read prompts", 240)
        (tmp_path / "heard").touch()  # no step ends before
        for step in run.steps():
            if step["step"] == 1:  # its line is written a moment later
                with run._client() as client:
                    during = wait_until(lambda: client.series(ASKED))
        run.wait()
    (one,) = during
    lines = {line["step"]: line for line in map(json.loads, (run.folder / "metrics.jsonl").open())}
    assert (list(one.steps), list(one.values)) == ([1], [lines[1]["reward_mean"]])
    assert lines[1]["engine_prefix_hit_share"] == 0.75  # four samples share their prompt

    for step in range(1, STEPS + 1):
        samples, line = list(read_all_samples(run.folder, step)), lines[step]
        rewards = [sample["reward"] for sample in samples]
        assert len(samples) == line["samples"] == line["user/calls"] == 8
        assert line["reward_median"] == statistics.median(rewards)
        assert line["reward_std"] == pytest.approx(statistics.pstdev(rewards))
        assert line["right_share"] == statistics.fmean(rewards)
        assert line["response_length_max"] == max(sample["length"] for sample in samples)
        assert line["user/bytes"] == max(sample["reward_parts"]["log/max/bytes"] for sample in samples)
    closed = list(closed_groups(run.folder))
    last = max(place for place, group in enumerate(closed) if "step" in group)
    scored = [group for group in closed[: last + 1] if "samples" in group]
    counts = {step: line["scored_groups"] for step, line in lines.items() if step}
    assert sum(counts.values()) == len(scored) >= 2 * STEPS, "dropped ones included"
    mean = sum(lines[step]["pass_at_1"] * count for step, count in counts.items()) / len(scored)
    assert mean == pytest.approx(statistics.fmean(group["right"] / group["samples"] for group in scored))

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in NAMES:
        shown = {event.step: event.value for event in events.Scalars(f"train/{name}")}
        assert shown == {step: pytest.approx(line[name]) for step, line in lines.items() if name in line}
        assert shown, name
