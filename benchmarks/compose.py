"""Containers: image sizes and build times, time from `up` to the first step, scaling during a run.

deploy/ci/docker.sh python -m benchmarks.compose [--rounds N] [--cold] -> benchmarks/results/compose.json

--cold first builds every image without the layer cache; pip's downloads stay cached.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reporting import machine, report
from relaxd.client.coordinator_client import CoordinatorClient
from tests.compose.conftest import CONFIG, REWARD
from tests.compose.stack import ROOT, SERVICES, Stack, docker, running
from tests.kit.models import make_tiny_model
from tests.kit.waiting import wait_until

IMAGES = (*SERVICES, "cli")


def seconds_of(action: Callable[[], Any]) -> float:
    """Return the seconds that `action` takes."""
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def build_seconds(context: Path, *options: str) -> dict[str, float]:
    """Build the images one by one from a source tree; return the seconds of each."""
    network = os.environ.get("BUILD_NETWORK", "default")
    seconds = {}
    for service in IMAGES:
        file = context / ("relaxd/cli" if service == "cli" else f"services/{service}") / "Dockerfile"
        torch = ["--build-arg", f"TORCH_INDEX_URL={os.environ.get('TORCH_INDEX_URL', '')}"]
        words = ["build", "--quiet", "--network", network, *torch, *options, "--file", str(file)]
        words += ["--tag", f"relaxd/{service}:dev", str(context)]
        seconds[service] = seconds_of(lambda w=words: docker(*w, timeout=1800))
    return seconds


def builds(cold: bool) -> dict[str, Any]:
    """Measure build times without the layer cache, with it, and after a change of relaxd's code."""
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        for name in ("relaxd", "services", "examples", "requirements"):
            shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / ".dockerignore", context)
        found: dict[str, Any] = {}
        if cold:
            found["without_cache"] = build_seconds(context, "--no-cache")
        build_seconds(context)
        found["unchanged"] = build_seconds(context)
        with (context / "relaxd" / "__init__.py").open("a") as file:
            file.write(f"# {time.time()}\n")
        found["code_changed"] = build_seconds(context)
    build_seconds(ROOT)
    return found


def sizes() -> dict[str, float]:
    """Return the megabytes of each image."""
    return {name: json.loads(docker("image", "inspect", f"relaxd/{name}:dev"))[0]["Size"] / 1e6 for name in IMAGES}


def new_replica_seconds(stack: Stack, role: str, count: int) -> float:
    """Scale a role to `count`; return the seconds until every new replica has completed its first group."""
    known = {replica.registration.replica_id for replica in stack.replicas(role)}
    begun = time.monotonic()
    stack.scale(**{role: count})

    def at_work() -> bool:
        new = [r for r in stack.replicas(role) if r.registration.replica_id not in known]
        return len(new) == count - len(known) and all(replica.status.done_groups for replica in new)

    wait_until(at_work, f"{role} at {count}", 180)
    return time.monotonic() - begun


def one_run(folder: Path, number: int) -> dict[str, float]:
    """Start everything, start a run, scale out and in."""
    examples = folder / "examples"
    examples.mkdir(parents=True)
    (examples / "tiny_reward.py").write_text(REWARD)
    (examples / "tiny.toml").write_text(CONFIG)
    model = make_tiny_model(folder / "tiny", architecture="qwen3")
    for path in (examples, model, *examples.iterdir(), *model.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    stack = Stack(f"relaxd-bench-{number}", examples)
    begun = time.monotonic()
    with running(stack, {}):
        found = {"up_to_healthy": time.monotonic() - begun}
        stack.compose("cp", str(model), "coordinator:/models/")
        started = time.monotonic()
        words = ("cli", "run", "examples/tiny.toml", "--run.steps", "5000")
        command = stack.start("run", "--rm", "--no-deps", "--no-TTY", *words)
        with CoordinatorClient(stack.address) as coordinator:
            wait_until(lambda: any(run.step for run in coordinator.runs()), "the first step", 180)
        found["command_to_first_step"] = time.monotonic() - started
        found["up_to_first_step"] = found["up_to_healthy"] + found["command_to_first_step"]
        for role in ("rollout", "reward"):
            found[f"{role}_out_to_first_group"] = new_replica_seconds(stack, role, 2)
            found[f"{role}_in"] = seconds_of(lambda r=role: stack.scale(**{r: 1}))
        command.terminate()
        command.wait(30)
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    before = machine()["load_before"]
    built, megabytes = builds(options.cold), sizes()
    rounds = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(one_run(Path(folder), number))
    rows: list[dict[str, Any]] = [{"figure": f"{name} image, MB", "median": size} for name, size in megabytes.items()]
    for how, seconds in built.items():
        rows += [{"figure": f"build {name}, {how}, s", "median": value} for name, value in seconds.items()]
        rows.append({"figure": f"build all, {how}, s", "median": sum(seconds.values())})
    for name in rounds[0]:
        rows.append({"figure": f"{name}, s", "median": statistics.median(each[name] for each in rounds)})
    report("compose", rows, load_before=before, rounds=rounds)


if __name__ == "__main__":
    main()
