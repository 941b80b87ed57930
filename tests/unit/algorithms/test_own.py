"""Algorithms of a user's own: the example, and what is wrong with a class is said before anything is trained."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from relaxd.algorithms import AlgorithmError, create
from relaxd.algorithms.algorithm_trial import create_tried
from relaxd.board import stages_for
from relaxd.cli.preparing.config_command import check_algorithm
from relaxd.config.algorithm import ALGORITHM, OwnConfig
from relaxd.config.load_toml import load_file
from relaxd.rpc.errors import InvalidArgument
from relaxd.v1.advantage_pb2 import ComputeRequest
from services.advantage.service import parse_compute_request
from services.coordinator.runs.starting import prepare
from tests.kit.processes import run_python
from tests.unit.algorithms.loss_inputs import make_inputs

torch.set_num_threads(1)
ROOT = Path(__file__).parents[3]
EXAMPLE = "own_algorithm:TOPR"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the example, in which services would be started."""
    (tmp_path / "own_algorithm.py").write_text((ROOT / "examples" / "own_algorithm.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("own_algorithm", "mine"):
        sys.modules.pop(name, None)


def own(name: str = EXAMPLE, **settings: Any) -> OwnConfig:
    config = ALGORITHM.validate_python({"name": name, "settings": settings})
    assert isinstance(config, OwnConfig)
    return config


def test_the_example_works_and_matches_its_formula() -> None:
    algorithm = create_tried(own(limit=0.9, kl_coef=0.1), with_loss=True)
    assert algorithm.needs.loss == ("rollout_logprobs", "advantages", "ref_logprobs")
    inputs = make_inputs()
    create_tried(own(limit=0.9), with_loss=False).loss(inputs).loss.backward()
    advantages = inputs.columns["advantages"]
    ratio = (inputs.logprobs.detach() - inputs.columns["rollout_logprobs"]).exp()
    weight = torch.where(advantages > 0, 1.0, ratio.clamp(max=0.9))
    torch.testing.assert_close(inputs.logprobs.grad, -inputs.weight * inputs.mask * weight * advantages)


def test_a_run_with_it_has_the_stages_of_its_columns() -> None:
    text = ["--algorithm.name", EXAMPLE]
    run = ROOT / "examples" / "addition.toml"
    assert "reference" not in {stage.name for stage in stages_for(load_file(run, text))}
    served = load_file(run, [*text, "--algorithm.settings.kl_coef=0.1", "--roles.reference.placement=service"])
    needs = {stage.name: stage.needs for stage in stages_for(served)}
    assert "ref_logprobs" in needs["train"]
    with pytest.raises(ValueError, match=r'it needs no reference, but roles\.reference\.placement is "service"'):
        stages_for(load_file(run, [*text, "--roles.reference.placement=service"]))


def test_a_changed_file_is_read_again(folder: Path) -> None:
    file = folder / "own_algorithm.py"
    assert not hasattr(create(own()), "second")
    file.write_text(file.read_text() + "\n    second = True\n")
    os.utime(file, (1, 1))  # within the clock's resolution the time could be the same
    assert hasattr(create(own()), "second")


BROKEN = """
import numpy as np
from relaxd.algorithms import GRPO, Advantages, LossOutput, Needs, PolicyTerm
from relaxd.algorithms.ppo import PPO

class Mine(GRPO):
    {body}

class WithCritic(PPO):
    {body}
"""
TERM = "def policy_term(self, tokens): return PolicyTerm({loss}, {ratio}, tokens.ratio > 9)"
"""A policy-gradient term of which numpy and torch would make something of the right shape in the end."""


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("absent:Mine", "", "module absent can't be imported: ModuleNotFoundError"),
        ("mine:Mien", "pass", "module mine has no Mien; did you mean Mine?"),
        ("mine:np", "pass", "has np, which isn't a class"),
        ("mine:Advantages", "pass", "no advantages and no token_weights and no normalizer and no loss and no needs"),
        ("mine:Mine", "loss = property()\n    import torch2", "No module named 'torch2'"),
        ("mine:Mine", "def __init__(self, config): raise OSError('no file')", "can't be made: OSError: no file"),
        ("mine:Mine", "needs = ('advantages',)", "needs is tuple"),
        ("mine:Mine", "def advantages(self, *_): return [1.0]", r"advantages\(\) returned list \[1.0\]: it must be"),
        (
            "mine:Mine",
            "def advantages(self, *_): return Advantages(np.zeros(3, np.float32))",
            r"values float32 \[3\]: they must be float32 \[10\]",
        ),
        (
            "mine:Mine",
            "def advantages(self, *_): return Advantages(np.zeros(10))",
            r"values float64 \[10\]: they must be float32 \[10\]",
        ),
        (
            "mine:Mine",
            "def advantages(self, *_): return Advantages(np.full(10, np.nan, np.float32))",
            r"of which \[0\] is nan",
        ),
        ("mine:Mine", "def advantages(self, rewards): return None", "failed on a made-up group: TypeError"),
        (
            "mine:Mine",
            "def token_weights(self, mask, lengths): return np.ones(10, np.float32)",
            "isn't 0 where the mask",
        ),
        ("mine:Mine", "def normalizer(self, *_): return 0", r"normalizer\(\) returned int 0: it must be a positive"),
        ("mine:Mine", "def loss(self, inputs): return 1.0", r"loss\(\) returned float 1.0: it must be LossOutput"),
        (
            "mine:Mine",
            "def loss(self, inputs): return LossOutput(inputs.logprobs)",
            r"a loss float32 \[10\]: it must be a scalar tensor",
        ),
        (
            "mine:Mine",
            "def loss(self, inputs): return LossOutput(inputs.logprobs.sum())",
            r"loss\(\) returned nan: fill",
        ),
        (
            "mine:Mine",
            "def loss(self, inputs): return LossOutput(inputs.mask.sum())",
            "a loss without a gradient: it must depend on inputs.logprobs",
        ),
        (
            "mine:Mine",
            "def loss(self, inputs): return LossOutput(inputs.logprobs.exp().masked_fill(inputs.mask == 0, 0).sum())",
            "the gradient of the loss is .*nan.*: it must be finite",
        ),
        (
            "mine:Mine",
            "def loss(self, inputs): return LossOutput(inputs.nothing)",
            "'LossInputs' object has no attribute",
        ),
        (
            "mine:Mine",
            TERM.format(loss="(tokens.advantages * tokens.logprobs).mean()", ratio="tokens.ratio"),
            r"policy_term\(\) returned loss float32 \[\]: it must be \[10\]",
        ),
        (
            "mine:Mine",
            TERM.format(loss="tokens.logprobs.unsqueeze(1)", ratio="tokens.ratio"),
            r"policy_term\(\) returned loss float32 \[10, 1\]: it must be \[10\]",
        ),
        (
            "mine:Mine",
            TERM.format(loss="tokens.logprobs.double()", ratio="tokens.ratio"),
            r"policy_term\(\) returned loss float64 \[10\]: it must be float32 \[10\], as logprobs",
        ),
        (
            "mine:Mine",
            TERM.format(loss="tokens.logprobs", ratio="1.0"),
            r"returned ratio float 1\.0: it must be \[10\]",
        ),
        ("mine:Mine", "def policy_term(self, tokens): return tokens.logprobs", "returned .*: it must be PolicyTerm"),
        (
            "mine:Mine",
            "def sample_advantages(self, rewards): return rewards[:, None]",
            r"sample_advantages\(\) returned float64 \[4, 1\]: it must be \[4\], one a sample",
        ),
        (
            "mine:Mine",
            "def sample_advantages(self, rewards): return None",
            r"sample_advantages\(\) returned object \[\]: it must be \[4\]",
        ),
        (
            "mine:Mine",
            "def token_advantages(self, rewards, lengths, _): return np.repeat(rewards, lengths)[:, None]",
            r"token_advantages\(\) returned float64 \[10, 1\]: it must be \[10\], one a token",
        ),
        (
            "mine:Mine",
            "def sample_advantages(self, rewards): return rewards * np.nan",
            "an advantage is nan, from rewards up to 1: it must be finite",
        ),
        ("mine:WithCritic", "value_clip = 0", "value_clip is int 0: it must be a positive number"),
        ("mine:WithCritic", "advantages_and_returns = None", r"advantages_and_returns\(\) failed on a made-up group"),
        (
            "mine:WithCritic",
            "def advantages_and_returns(self, group): return group",
            r"advantages_and_returns\(\) returned ValuedGroup .*: it must be AdvantagesAndReturns",
        ),
        (
            "mine:WithCritic",
            "def advantages_and_returns(self, group):\n"
            "        return super().advantages_and_returns(group)._replace(returns=group.values * np.inf)",
            r"advantages_and_returns\(\) returned returns of which \[0\] is -inf: they must be finite",
        ),
    ],
)
def test_what_is_wrong_with_a_class_is_said(folder: Path, name: str, body: str, message: str) -> None:
    (folder / "mine.py").write_text(BROKEN.format(body=body))
    with pytest.raises(AlgorithmError, match=message) as refused:
        create_tried(own(name), with_loss=True)
    assert f"algorithm.name = '{name}'" in str(refused.value)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(AlgorithmError, match=r"settings doesn't fit own_algorithm:TOPR: limit: .*greater than"):
        create(own(limit=0))
    with pytest.raises(AlgorithmError, match=r"limt: Extra inputs"):
        create(own(limt=1.0))


def test_config_check_and_the_start_of_a_run_refuse_a_broken_class(folder: Path, redis_url: str) -> None:
    (folder / "mine.py").write_text(BROKEN.format(body="def loss(self, inputs): return LossOutput(inputs.mask.sum())"))
    config = load_file(ROOT / "examples" / "addition.toml", ["--algorithm.name", "mine:Mine"])
    assert [str(problem) for problem in check_algorithm(config)] == [
        "algorithm.name = 'mine:Mine': loss() returned a loss without a gradient: it must depend on inputs.logprobs"
    ]
    (folder / "mine.py").write_text(BROKEN.format(body="def normalizer(self, *_): return 0"))
    os.utime(folder / "mine.py", (1, 1))
    text = (ROOT / "examples" / "addition.toml").read_text().replace('name = "grpo"', 'name = "mine:Mine"')
    with pytest.raises(InvalidArgument, match=r"normalizer\(\) returned int 0") as refused:
        prepare("run", text, "", redis_url, "")
    assert [field for field, _ in refused.value.violations] == ["config_toml.algorithm.name"]


@pytest.mark.parametrize("command", [["config", "check"], ["rehearse"], ["run"]], ids=" ".join)
def test_every_command_refuses_a_broken_class_as_the_users(folder: Path, command: list[str]) -> None:
    """Before it looks for the model: what else is checked needs the class."""
    (folder / "mine.py").write_text("class Mine: pass")
    text = (ROOT / "examples" / "addition.toml").read_text().replace("smollm2-135m", "absent")
    (folder / "run.toml").write_text(text)
    done = run_python("-m", "relaxd.cli", *command, "run.toml", "--algorithm.name=mine:Mine", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: algorithm.name = 'mine:Mine': the class has no advantages and no token_weights"
    )
    assert "bug in relaxd" not in done.stderr


def test_a_call_of_the_advantage_service_cannot_name_a_class() -> None:
    request = ComputeRequest(algorithm_json='{"name": "os:system"}', rewards=[1.0], lengths=[1])
    with pytest.raises(Exception, match="a call can only use the algorithms of relaxd"):
        parse_compute_request(request)
