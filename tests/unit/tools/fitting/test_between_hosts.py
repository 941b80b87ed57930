"""Bytes between the hosts of a trainer, beside sums over groups that Megatron's own generator makes."""

from pathlib import Path
from typing import Any

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import pytest
from megatron.core.parallel_state import RankGenerator

from relaxd.models.layouts import Layout, stage_parameters
from relaxd.models.shape import read_shape
from relaxd.tools.fitting.speed import StepWork, crossing_bytes, groups
from tests.unit.tools.fitting.models import write_config

LAYOUTS = [
    Layout(8, 2, 2, 2, 1),
    Layout(16, 2, 2, 1, 1),
    Layout(8, 1, 1, 2, 4),
    Layout(16, 2, 2, 2, 2),
    Layout(12, 1, 3, 2, 1),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_groups_are_megatron_s(layout: Layout) -> None:
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(layout.tensor, 1, layout.data, layout.pipeline, layout.context, order)
    experts = RankGenerator(layout.expert_tensor, layout.expert, layout.expert_data, layout.pipeline, 1, order)
    for kind, generator, token in (
        ("data and context", dense, "dp-cp"),
        ("context", dense, "cp"),
        ("expert", experts, "ep"),
        ("expert data", experts, "dp"),
    ):
        assert sorted(groups(layout, kind)) == sorted(map(sorted, generator.get_ranks(token))), kind


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return read_shape(write_config(tmp_path / "small", "1.7b"))


def test_data_parallel_hosts_send_gradients_and_weights_once_each(model: Any) -> None:
    work = StepWork(tokens=1e6, attended=1e9, micro_batch_tokens=16384)
    found = crossing_bytes(model, Layout(16), work, 2, 2)
    parameters = stage_parameters(model, Layout(16), 0).dense
    # One ring of 16, of which one link leaves each host.
    assert found == {
        "gradients": pytest.approx(parameters * 4 * 15 / 16),
        "updated weights": pytest.approx(parameters * 2 * 15 / 16),
    }
    assert crossing_bytes(model, Layout(16), work, 4, 2) == found  # the same from each of more hosts
    thrice = StepWork(tokens=1e6, attended=1e9, micro_batch_tokens=16384, updates=3)
    assert crossing_bytes(model, Layout(16), thrice, 2, 2)["gradients"] == pytest.approx(3 * found["gradients"])


def test_pipeline_stages_on_two_hosts_send_rows(model: Any) -> None:
    work = StepWork(tokens=1e6, attended=1e9, micro_batch_tokens=16384)
    layout = Layout(8, 2, 2)  # TP2 PP2 DP2: a host has a stage, with all that share its parameters
    found = crossing_bytes(model, layout, work, 2, 2)
    # Both copies' tokens, once forward (the first host) or backward (the second).
    assert found == {"rows between pipeline stages": pytest.approx(1e6 * model.hidden * 2)}


def test_experts_on_two_hosts_exchange_half_of_the_rows(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path / "moe", "mixture"))
    work = StepWork(tokens=1e6, attended=1e9, micro_batch_tokens=16384)
    found = crossing_bytes(shape, Layout(8, expert=8), work, 2, 2)
    assert shape.experts is not None
    each_way = 1e6 / 2 * shape.experts.per_token * shape.hidden * 2 * shape.layers
    assert found["rows to experts and back"] == pytest.approx(4 * each_way / 2)
    within = crossing_bytes(shape, Layout(8, expert=4), work, 2, 2)  # each host has all experts
    assert "rows to experts and back" not in within
    assert within["gradients"] > found["gradients"]
