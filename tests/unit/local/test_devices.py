"""What is said before a run is started on too few GPUs."""

import pytest

from relaxd.config.load_toml import load
from relaxd.local.devices import check_devices

RUN = """
run.steps = 1
model.path = "model"
data.source = "addition"
reward.name = "addition"
"""
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


@pytest.mark.parametrize(
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
