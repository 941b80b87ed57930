"""The benchmark of modes, tried on a CPU: its model's answers are as long as they should be, and a run is measured."""

import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import modes
from benchmarks.long_tail import END, make_long_tail_model

MEAN = 12.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("modes")
    make_long_tail_model(place / "model", "tiny", MEAN, dtype=torch.float32)
    return place


def test_answers_have_geometric_lengths(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    torch.manual_seed(0)
    prompts = torch.tensor([[1, 70, 80, 90]] * 400)
    answers = model.generate(prompts, do_sample=True, max_new_tokens=150, top_k=0)[:, 4:]
    lengths = torch.where((answers == END).any(1), (answers == END).int().argmax(1) + 1, 150).double()
    # The standard deviation of a geometric distribution is sqrt(1 - p) / p; the mean of 400 is known to a twentieth.
    assert float(lengths.mean()) == pytest.approx(MEAN, rel=0.2)
    assert float(lengths.std()) == pytest.approx((MEAN * (MEAN - 1)) ** 0.5, rel=0.25)


def test_cases() -> None:
    cases = modes.make_cases(["async", "sync", "colocate", "async@3"], [1, 3], gpus=4, ranks=2)
    assert [(c.run_id, c.ranks, c.engines, c.staleness, c.gpus) for c in cases] == [
        ("async", 2, 2, 1, 4),
        ("sync", 2, 2, 0, 4),
        ("colocate", 4, 4, 0, 4),
        ("async-3", 2, 2, 3, 4),
        ("async-replicas-1", 1, 1, 1, 2),
        ("async-replicas-3", 1, 3, 1, 4),
    ]
    with pytest.raises(SystemExit, match="'asinc'"):
        modes.make_cases(["asinc"], [], gpus=2, ranks=1)


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_run_is_measured(folder: Path, tmp_path: Path) -> None:
    words = "--cpu --longest 64 --groups 4 --samples 4 --running 32 --micro-batch 1024 --warmup 1 --seconds 1 --keep"
    options = modes.parse([*words.split(), str(tmp_path)])
    (case,) = modes.make_cases(["async"], [], gpus=2, ranks=1)
    row = modes.run_case(case, folder, options, time.monotonic() + 360)
    assert row["steps"] >= 3
    assert row["samples/s"] * row["step s"] == pytest.approx(16)  # 4 groups x 4 samples a step
    assert 0 < row["length"] < 64
    assert row["most stale"] <= 1
    assert len((tmp_path / "async.jsonl").read_text().splitlines()) >= 1 + row["steps"]
    modes_shown = modes.with_ratios([row, row | {"mode": "sync", "samples/s": row["samples/s"] / 2}])
    assert [shown["x sync"] for shown in modes_shown] == [2, 1]
