"""Weight synchronisations between the source and an engine, and what its answers have to be afterwards."""

from itertools import count
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from relaxd.v1 import rollout_pb2
from services.rollout.engines.request_types import Version
from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.weight_source import weights_of
from tests.kit.engines import Answer, EngineRunner, receive_request, reference_logprobs

NUMBERS = count()
"""Names of groups are never used twice."""


def join(runner: EngineRunner, source: Source, ranks: int = 1) -> str:
    """Connect both sides of a new group, the engine with so many ranks; returns its name."""
    name = f"group-{next(NUMBERS)}"
    source.tell(do="connect", name=name, world_size=1 + ranks)
    runner.join(name, source.port, source.manifest, world_size=1 + ranks)
    assert source.answer() == {}
    return name


def transfer(runner: EngineRunner, source: Source, name: str, version: int) -> None:
    """Broadcast and commit a version, checked tensor by tensor."""
    source.tell(do="broadcast", version=version, buckets=None)
    received = runner.receive(name, version, checksum=True)
    assert received == source.answer()["checksums"]


def sync(runner: EngineRunner, source: Source, version: int, mode: str = "in_place", ranks: int = 1) -> int:
    """Pause, send a version in a new group, resume; returns how many samples were held."""
    held = runner.pause(mode)
    transfer(runner, source, join(runner, source, ranks), version)
    runner.resume()
    return held


def pausing_request(
    name: str, version: Version, mode: str = "in_place", *, pause_timeout: float = 30.0
) -> rollout_pb2.ReceiveWeightsRequest:
    """A version for which the engine pauses by itself, and resumes."""
    request = receive_request(name, version, 20, checksum=True)
    request.pause.mode = rollout_pb2.PauseMode.Value(f"PAUSE_MODE_{mode.upper()}")
    request.pause.lease_seconds, request.pause_timeout_seconds, request.resume = 600, pause_timeout, True
    return request


def sync_at_once(runner: EngineRunner, source: Source, name: str, version: int, mode: str = "in_place") -> None:
    """Send a version in a group, checked tensor by tensor, with one call for pause, reception and resume."""
    source.tell(do="broadcast", version=version, buckets=None)
    received = runner.run(runner.engine.receive(pausing_request(name, Version(1, version), mode)))
    assert dict(received.checksums) == source.answer()["checksums"]


def with_weights(folder: Path, version: int) -> PreTrainedModel:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.load_state_dict(weights_of(folder, version), strict=False)
    return reference


def check_logprobs(folder: Path, prompt: list[int], answer: Answer, temperature: float = 1.0) -> None:
    """Each token's log-prob is that under the version that it is said to be of."""
    for version in set(answer.versions):
        right = reference_logprobs(with_weights(folder, version), prompt, answer.tokens, temperature)
        rows = [row for row, each in enumerate(answer.versions) if each == version]
        torch.testing.assert_close(torch.tensor(answer.logprobs).double()[rows], right[rows], atol=2e-5, rtol=0)
