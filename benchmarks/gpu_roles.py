"""Measure what an algorithm's roles cost a training step on one GPU: reference, critic, old log-probs, teacher.

    python -m benchmarks.gpu_roles                             # one H200, a 1.7 B model of random weights: minutes
    python -m benchmarks.gpu_roles --cpu                       # tries the script on a tiny model, and reports nothing
    python -m benchmarks.gpu_roles --cases grpo "ppo, critic inside"
    python -m benchmarks.gpu_roles --apart --cases grpo "grpo, reference inside" "grpo, reference beside"    # two GPUs

The trainer and the services of roles are real processes on a real board. This script plays the coordinator and all
stages before them, with made-up answers of one length to prompts of five tokens: every case gets the same groups, two
steps ahead of the trainer, so that it never waits for an engine. Services share the trainer's GPU, so "beside" shows
what a service of its own costs when no GPU is spared for it. With --apart they have the second GPU. Seconds are medians
over the steps after the first: of a step, of computing in it, and of what the trainer waited in it for groups, and took
for the step's file. "GB" is what is in use of the first GPU at the case's end, caches included.

Old log-probs are prepared only for steps of several updates, so both of these cases have two mini-batches.

The teacher alone scores groups without a trainer: tokens of answers a second in three windows, and the share of the
GPU's bf16 peak of their median, with 2 x parameters x tokens FLOPs and those of attention.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_models import SHAPES, peak_flops, prepare_model
from benchmarks.reporting import report
from relaxd.config import RunConfig
from relaxd.replica.gpus import memory_used, visible_gpus
from relaxd.roles import CRITIC, REFERENCE, ROLES, TEACHER, TRAINER
from relaxd.v1 import coordinator_pb2
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY
from tests.integration.trainer.service_kit import Feeder, ScriptedCoordinator, TrainerProcess, make_config
from tests.kit.models import make_tiny_model
from tests.kit.redis.redis_server import RedisServer

SECONDS = 180.0
"""Deadline of a case."""
KL = {"kl_coef": 0.01}


class Case(NamedTuple):
    """Settings of a case."""

    algorithm: Mapping[str, Any]
    """Settings of the algorithm; GRPO if they don't name one."""
    roles: Mapping[str, Any] = MappingProxyType({})
    """Settings of roles."""
    service: str = ""
    """The role that has a service."""
    mini_batches: int = 1
    """Updates of a step."""


CASES = {
    "grpo": Case({}),
    "grpo, advantages normalised over the step": Case({"name": "reinforce_plus_plus_baseline"}),
    "grpo, 2 updates": Case({}, mini_batches=2),
    "grpo, 2 updates, old log-probs prepared": Case({"old_logprobs": "current"}, mini_batches=2),
    "grpo, reference inside": Case(KL),
    "grpo, reference beside": Case(KL, {"reference": {"placement": "service"}}, REFERENCE),
    "ppo, critic inside": Case({"name": "ppo"}),
    "ppo, critic beside": Case({"name": "ppo"}, {"critic": {"placement": "service"}}, CRITIC),
}
TEACHER_ALONE = "teacher alone"
WINDOWS = 3
"""Windows in which the teacher's speed is measured."""
SHOWN = ("step_seconds", "train_seconds", "wait_seconds", "step_file_seconds")


class GpuCoordinator(ScriptedCoordinator):
    """A coordinator that grants every replica the GPU number `gpu`."""

    gpu = 0

    def Register(self, request: coordinator_pb2.RegisterRequest, context: Any) -> coordinator_pb2.RegisterResponse:
        """Register the replica for as long as a case takes."""
        response = super().Register(request, context)
        response.gpu_lease_seconds = SECONDS
        return response

    def Heartbeat(self, request: coordinator_pb2.HeartbeatRequest, context: Any) -> coordinator_pb2.HeartbeatResponse:
        """Renew it."""
        response = super().Heartbeat(request, context)
        response.gpu_lease_seconds = SECONDS
        return response

    def LeaseGpus(self, request: coordinator_pb2.LeaseGpusRequest, context: Any) -> coordinator_pb2.LeaseGpusResponse:
        """Grant what is asked for, whoever else has it."""
        granted = request.candidate_uuids[self.gpu : self.gpu + request.count]
        return coordinator_pb2.LeaseGpusResponse(gpu_uuids=granted)


def configure(model: Path, case: Case, steps: int, options: argparse.Namespace) -> RunConfig:
    """Return the configuration of a case."""
    dtype = "float32" if options.cpu else "bfloat16"
    return make_config(
        model,
        run={"steps": steps},
        algorithm={"name": "grpo", **case.algorithm},
        roles=dict(case.roles),
        rollout={"samples_per_prompt": options.samples, "max_new_tokens": options.new_tokens},
        trainer={
            "dtype": dtype,
            "groups_per_step": options.groups,
            "mini_batches": case.mini_batches,
            "micro_batch_tokens": options.micro_batch,
            "threads": 0,
            "collective_timeout_seconds": 120,
            "checkpoint": {"every": 0},
            "optimizer": {"lr": 1e-9},
        },
        board={"max_staleness": steps, "lease_seconds": 60},
    )


def feed(feeder: Feeder, groups: int, options: argparse.Namespace) -> None:
    """Bring groups to the stages behind reward and advantage."""
    logprobs = np.full(options.samples * options.new_tokens, -12.0, np.float32)
    feeder.feed(groups, 0, length=options.new_tokens, rollout_logprobs=logprobs)


@contextlib.contextmanager
def service(config: RunConfig, url: str, folder: Path, role: str, gpu: int = 0) -> Iterator[GpuCoordinator]:
    """Start a service of a role on a GPU; it loads its model after this."""
    coordinator = GpuCoordinator(config, folder, role)
    coordinator.gpu = gpu
    process = TrainerProcess(coordinator, url, module=ROLES[role].module)
    try:
        yield coordinator
    finally:
        process.close()
        coordinator.close()


def run_case(name: str, model: Path, url: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train some steps; return the medians of all but the first."""
    case = CASES[name]
    config = configure(model, case, options.steps, options)
    with contextlib.ExitStack() as stack:
        feeder = Feeder(url, config)
        stack.callback(feeder.board.close)
        feed(feeder, 2 * options.groups, options)
        if case.service:
            beside = stack.enter_context(service(config, url, folder, case.service, int(options.apart)))
            beside.wait(partial(is_ready, beside), SECONDS)
        trainer = stack.enter_context(service(config, url, folder, TRAINER))
        for step in range(1, options.steps + 1):
            trainer.wait(partial(has_announced, trainer, step), SECONDS)
            if step + 2 <= options.steps:
                feed(feeder, options.groups, options)
        gigabytes = gpu_gigabytes()
        lines = [entry.metrics for entry in feeder.board.ledger()[1:]]
    seconds = {key: statistics.median(line[key] for line in lines) for key in SHOWN}
    trained = options.groups * options.samples * options.new_tokens
    return {"case": name, **seconds, "tokens/s": trained / seconds["step_seconds"], "GB": gigabytes}


def run_teacher(model: Path, url: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Have a teacher score groups that all wait for it, from its first result on."""
    algorithm = {"name": "opd", "distill_coef": 0.0, "distill_loss_coef": 1.0}
    case = Case(algorithm, {"teacher": {"model": str(model)}})
    config = configure(model, case, 1 + WINDOWS * options.steps, options)
    feeder, rates, groups = Feeder(url, config), [], options.groups
    with contextlib.closing(feeder.board), service(config, url, folder, TEACHER) as teacher:
        feed(feeder, groups, options)
        teacher.wait(partial(has_done, teacher, groups), SECONDS)
        for _ in range(WINDOWS):
            begun, before = time.monotonic(), groups
            groups += options.groups * options.steps
            feed(feeder, groups - before, options)
            teacher.wait(partial(has_done, teacher, groups), SECONDS)
            rates.append((groups - before) * options.samples * options.new_tokens / (time.monotonic() - begun))
        gigabytes = gpu_gigabytes()
    print(f"{TEACHER_ALONE}: tokens/s in each window: {', '.join(f'{rate:,.0f}' for rate in rates)}")
    return {
        "case": TEACHER_ALONE,
        **dict.fromkeys(SHOWN, ""),
        "tokens/s": statistics.median(rates),
        "GB": gigabytes,
    }


def has_done(coordinator: ScriptedCoordinator, groups: int) -> bool:
    """Return whether the replica has done so many groups."""
    return coordinator.status.done_groups == groups


def is_ready(coordinator: ScriptedCoordinator) -> bool:
    """Return whether the replica has its model."""
    return coordinator.status.state == REPLICA_STATE_READY


def has_announced(coordinator: ScriptedCoordinator, version: int) -> bool:
    """Return whether the trainer has committed a step."""
    return any(announced == version for _, announced in coordinator.announced)


def forward_flops(model: Path, tokens: int) -> float:
    """Return the FLOPs of a forward pass for each token of a sequence of `tokens`, logits included."""
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 2 * parameters + attention * tokens / 2


def gpu_gigabytes() -> float:
    """Return what is in use of the first GPU, 0 without one."""
    gpus = visible_gpus()[:1]
    return memory_used(gpus)[0] / 1e9 if gpus else 0.0


def main() -> None:
    """Run all cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=(*CASES, TEACHER_ALONE), default=[*CASES, TEACHER_ALONE])
    parser.add_argument("--shape", choices=SHAPES, default="1.7b")
    parser.add_argument("--groups", type=int, default=16, help="groups of a step")
    parser.add_argument("--samples", type=int, default=8, help="answers of a group")
    parser.add_argument("--new-tokens", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--micro-batch", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--apart", action="store_true", help='services ("beside") have the second GPU')
    parser.add_argument("--cpu", action="store_true", help="try the script on a tiny model")
    options = parser.parse_args()
    if options.apart and len(visible_gpus()) < 2:
        parser.error(f"--apart needs two GPUs, and {len(visible_gpus())} can be seen")
    rows: list[dict[str, Any]] = []
    failed = 0
    with tempfile.TemporaryDirectory(prefix="relaxd-roles-") as name:
        place = Path(name)
        model = (
            make_tiny_model(place / "model", architecture="qwen3")
            if options.cpu
            else prepare_model(options.shape, None)
        )
        for number, case in enumerate(options.cases):
            folder = place / f"case-{number}"
            folder.mkdir()
            server = RedisServer(folder).start()
            run = run_teacher if case == TEACHER_ALONE else partial(run_case, case)
            try:
                rows.append(run(model, server.url, folder, options))
                print(rows[-1], flush=True)
            except AssertionError as error:  # the next case may work
                failed += 1
                print(f"{case} failed: {error}", flush=True)
            finally:
                server.kill()
        facts: dict[str, Any] = {}
        scored = [row["tokens/s"] for row in rows if row["case"] == TEACHER_ALONE]
        if scored and not options.cpu:
            share = scored[0] * forward_flops(model, options.new_tokens) / peak_flops()
            facts["teacher's share of the GPU's bf16 peak"] = round(share, 3)
    if rows and not options.cpu:
        sizes = {
            key: getattr(options, key) for key in ("shape", "groups", "samples", "new_tokens", "micro_batch", "steps")
        }
        report("gpu-roles" + ("-apart" if options.apart else ""), rows, failed=failed, **sizes, **facts)
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
