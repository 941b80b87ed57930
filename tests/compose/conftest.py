"""A Docker engine, the images, and a tiny run for them."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.compose.stack import SERVICES, Stack, docker
from tests.kit.models import make_tiny_model

# Never the same for all samples of a group, so that there is something to learn to the end; and as slow as a judge that
# asks a model, so that more replicas make it faster.
REWARD = """
import time

def letters(sample):
    time.sleep(0.03)
    share = len({c for c in sample.response if c.isascii() and c.islower()}) / 12
    return {"reward": share, "accuracy": float(share > 0.5), "format": float(len(sample.response) > 2)}
"""
CONFIG = """
[run]
steps = 60

[model]
path = "tiny"

[data]
source = "addition"
max_prompt_tokens = 128

[reward]
name = "tiny_reward:letters"
workers = 1

[rollout]
samples_per_prompt = 8
max_new_tokens = 12
threads = 1

[trainer]
groups_per_step = 4
threads = 1

[trainer.optimizer]
lr = 2e-3

[eval]
prompts = 8
"""


@pytest.fixture(scope="session")
def engine() -> None:
    """A Docker engine with Compose; without one, or unless asked for, the test is skipped."""
    if not os.environ.get("RELAXD_TEST_COMPOSE"):
        pytest.skip("containers are tested by `make test-compose`")
    if why := os.environ.get("RELAXD_NO_DOCKER"):
        pytest.skip(f"no Docker engine: {why}")
    for words in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(words, capture_output=True, timeout=30, check=False).returncode == 0
        except FileNotFoundError:
            done = False
        if not done:
            pytest.skip(f"no Docker engine (`{' '.join(words)}` fails)")


@pytest.fixture(scope="session")
def images(engine: None) -> dict[str, str]:
    """Names of the images, by service, built from this source tree."""
    # One after the other: those with torch share their largest layer, which is then made once.
    for service in (*SERVICES, "cli"):
        docker("compose", "--profile", "*", "build", service, timeout=1500)
    return {service: f"relaxd/{service}:{os.environ.get('RELAXD_VERSION', 'dev')}" for service in (*SERVICES, "cli")}


@pytest.fixture
def stack(images: dict[str, str], tmp_path: Path) -> Stack:
    """A project that is not up yet, with the tiny run in its examples and the tiny model beside them."""
    examples = tmp_path / "examples"
    examples.mkdir()
    (examples / "tiny_reward.py").write_text(REWARD)
    (examples / "tiny.toml").write_text(CONFIG)
    model = make_tiny_model(tmp_path / "tiny", architecture="qwen3")
    for path in (examples, model, *examples.iterdir(), *model.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)  # the containers' user is another
    return Stack(f"relaxd-test-{os.getpid()}", examples)
