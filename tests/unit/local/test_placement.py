"""The replicas that commands start (options before [placement], and that before the table of roles), and their GPUs."""

from pathlib import Path

import pytest

from relaxd.cli.execute import Where, _replicas
from relaxd.cli.options import with_replica_options
from relaxd.config.load_toml import ConfigError, load
from relaxd.config.role_settings import PLACED
from relaxd.local.placement import check_devices, machine_problems, placed_replicas, placement_problems
from relaxd.local.state_folder import StateFolder
from relaxd.roles import SCALABLE_ROLES
from tests.kit.cases import each

RUN = """
run.steps = 1
model.path = "model"
data.source = "addition"
reward.name = "addition"
"""
ENGINES = 'weights.transport = "nccl"\nrollout.engine = "sglang"\nrollout.tensor_parallel = 2\n'
CRITIC = 'algorithm.name = "ppo"\nroles.critic.placement = "service"\n'


def test_the_roles_that_can_be_placed_are_those_that_can_be_scaled() -> None:
    assert set(PLACED) == set(SCALABLE_ROLES)


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        ("", {}, {"rollout": 1, "reward": 1, "advantage": 1, "judge": 0, "critic": 0}),
        ("placement.replicas = { rollout = 3, reward = 2 }", {}, {"rollout": 3, "reward": 2, "advantage": 1}),
        ("placement.replicas = { rollout = 3, reward = 2 }", {"rollout": 2}, {"rollout": 2, "reward": 2}),
        (ENGINES + "placement.gpus.rollout = 6", {}, {"rollout": 3}),
        (ENGINES + "placement.gpus.rollout = 6", {"rollout": 1}, {"rollout": 1}),
        (CRITIC, {}, {"critic": 1, "trainer": 1}),
        (CRITIC, {"critic": 0}, {"critic": 1}),
        ("trainer.ranks = 4", {}, {"ranks": 0}),
        ("trainer.ranks = 4\ntrainer.hosts = 4", {}, {"ranks": 3}),
        ("trainer.ranks = 4\ntrainer.hosts = 4\nplacement.replicas.ranks = 4", {"ranks": 1}, {"ranks": 3}),
        ("trainer.ranks = 4\ntrainer.hosts = 4\nplacement.replicas.ranks = 4", {}, {"ranks": 4}),
    ],
)
def test_options_come_before_the_file(
    settings: str, given: dict[str, int], expected: dict[str, int], tmp_path: Path
) -> None:
    config = load(RUN + settings)
    assert expected.items() <= placed_replicas(config, given).items()
    assert expected.items() <= _replicas(Where(StateFolder(tmp_path), replicas=given), config).items()


def test_only_options_that_were_given_override() -> None:
    found: list[dict[str, int]] = []
    command = with_replica_options(lambda replicas: found.append(dict(replicas)))
    command(**(dict.fromkeys(SCALABLE_ROLES) | {"rollout": 2}))
    assert found == [{"rollout": 2}]


@each(
    ("settings", "visible", "problem"),
    [
        ("placement.replicas.rollout = 3", 0, ""),
        (ENGINES + "placement.gpus.rollout = 6", 7, ""),
        (
            ENGINES + "placement.gpus.rollout = 6",
            6,
            "trainer.ranks = 1 and 3 x rollout.tensor_parallel = 6 of the engines need 7 GPUs; this machine shows 6",
        ),
        (
            ENGINES + "placement.gpus.rollout = 16",
            8,
            "placement.gpus.rollout = 16, but that needs 16 GPUs, and this machine shows 8",
        ),
        (
            ENGINES + "placement.replicas.rollout = 8",
            8,
            "placement.replicas.rollout = 8, but that needs 16 GPUs, and this machine shows 8",
        ),
        (
            ENGINES + "placement.gpus.rollout = 5",
            8,
            "placement.gpus.rollout = 5, but a replica has 2 GPUs: use a multiple, such as 4",
        ),
        (
            ENGINES + "trainer.ranks = 4\ntrainer.hosts = 2",
            5,
            "trainer.ranks = 4 and 1 x rollout.tensor_parallel = 2 of the engines and 2 of ranks replicas need 6 GPUs; "
            "this machine shows 5",
        ),
        (
            "placement.gpus.rollout = 2",
            8,
            "placement.gpus.rollout = 2, but rollout replicas use no GPU: give placement.replicas.rollout",
        ),
        (
            "placement.replicas.judge = 1",
            0,
            "placement.replicas.judge = 1, but the run has no such role: remove it",
        ),
        (
            CRITIC + "placement.replicas.critic = 2",
            8,
            "placement.replicas.critic = 2, but that is 2 replicas, and there may be 1",
        ),
    ],
)
def test_what_can_not_be_placed_is_refused(settings: str, visible: int, problem: str) -> None:
    problems = machine_problems(load(RUN + settings), {}, visible)
    assert [str(one) for one in problems] == ([problem] if problem else [])


def test_what_an_option_overrides_is_not_refused() -> None:
    config = load(RUN + ENGINES + "placement.gpus.rollout = 16")
    assert placement_problems(config, {"rollout": 1}, 8) == []
    assert machine_problems(config, {"rollout": 1}, 8) == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("placement.replicas.rolout = 2", "placement.replicas.rolout is 2, but the roles that can be placed are"),
        ("placement.gpus.trainer = 2", "there is one trainer, whose GPUs are trainer.ranks: set that"),
        ("placement.replicas.reward = 0", "placement.replicas.reward = 0: must be more than 0"),
        (
            "placement = { replicas = { rollout = 2 }, gpus = { rollout = 4 } }",
            "placement.replicas.rollout is 2 and placement.gpus.rollout is 4: give one of them",
        ),
    ],
)
def test_wrong_roles_and_numbers_are_refused_by_name(settings: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(RUN + settings)


NCCL = '\nweights.transport = "nccl"\nrollout.engine = "sglang"'
SHARED = '\nrun.colocate = true\nboard.max_staleness = 0\nrollout.engine = "sglang"'
REFERENCE = """
algorithm.kl_coef = 0.1
roles.reference.placement = "service"
roles.reference.tensor_parallel = 2
"""
JUDGE = """
roles.judge.model = "judge"
roles.judge.engine = "sglang"
roles.judge.tensor_parallel = 2
"""
BESIDE = JUDGE + "roles.judge.gpu_share = 0.3"
TEACHER = """
algorithm.name = "opd"
roles.teacher.model = "teacher"
roles.teacher.engine = "sglang"
roles.teacher.tensor_parallel = 2
"""
IPC = SHARED + '\nweights.transport = "cuda_ipc"'


@each(
    ("settings", "engines", "visible", "expected"),
    [
        ("", 3, 0, ""),
        ("", 3, 1, ""),
        (NCCL, 1, 2, ""),
        (NCCL, 1, 0, 'weights.transport = "nccl" needs GPUs, and this machine shows none: use "gloo"'),
        (
            NCCL + "\nrollout.tensor_parallel = 2",
            2,
            4,
            "trainer.ranks = 1 and 2 x rollout.tensor_parallel = 4 of the engines need 5 GPUs; this machine shows 4",
        ),
        ("\ntrainer.ranks = 2", 1, 1, "trainer.ranks = 2 need 2 GPUs; this machine shows 1"),
        (IPC, 1, 1, ""),
        (IPC, 1, 0, 'weights.transport = "cuda_ipc" needs GPUs'),
        (SHARED, 1, 1, 'run.colocate on GPUs needs rollout.engine = "sglang" and weights.transport = "cuda_ipc"'),
        (IPC, 2, 2, "trainer.ranks = 1, but 2 x rollout.tensor_parallel = 2 GPUs are the engines'"),
        (NCCL + REFERENCE, 1, 4, ""),
        (
            NCCL + REFERENCE,
            1,
            3,
            "tensor_parallel = 1 of the engines and 2 of reference replicas need 4 GPUs; this machine shows 3",
        ),
        (NCCL + JUDGE, 2, 5, ""),
        (NCCL + JUDGE, 2, 4, "= 2 of the engines and 2 of judge replicas need 5 GPUs; this machine shows 4"),
        (NCCL + BESIDE, 2, 3, ""),
        (NCCL + BESIDE, 3, 4, ""),
        (NCCL + BESIDE, 1, 2, "= 1 of the engines and 1 of judge replicas need 3 GPUs; this machine shows 2"),
        (TEACHER, 1, 0, 'roles.teacher.engine = "sglang" needs GPUs, and this machine shows none: use "megatron"'),
        (NCCL + TEACHER, 2, 5, ""),
        (NCCL + TEACHER, 2, 4, "= 2 of the engines and 2 of teacher replicas need 5 GPUs; this machine shows 4"),
        (NCCL + TEACHER + "roles.teacher.gpu_share = 0.3", 2, 3, ""),
        (IPC + JUDGE, 1, 2, "trainer.ranks = 1 needs 1 GPUs, and 2 beside them for roles that don't take turns"),
        (IPC + BESIDE, 1, 2, ""),
        (IPC + BESIDE + "\ntrainer.ranks = 2", 2, 2, ""),
        (IPC + REFERENCE, 1, 3, ""),
        (IPC + REFERENCE, 1, 2, "trainer.ranks = 1 needs 1 GPUs, and 2 beside them for roles that don't take turns"),
        (IPC + "\ntrainer.ranks = 2", 2, 1, "trainer.ranks = 2 needs 2 GPUs; this machine shows 1"),
    ],
)
def test_too_few_gpus_are_named(settings: str, engines: int, visible: int, expected: str) -> None:
    problems = check_devices(load(RUN + settings), {"rollout": engines}, visible)
    assert expected in "".join(map(str, problems))
    assert bool(problems) == bool(expected)
