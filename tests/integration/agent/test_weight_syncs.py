"""Weight synchronisations within a conversation, whose engine is a real one, beside transformers' own pass."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from relaxd.data.tokenizer import PromptTokenizer
from services.agent.conversation import Conversation
from tests.integration.agent.conversation_kit import ASKED, config_of, service_of, talks
from tests.integration.agent.scripted_engines import Fleet
from tests.integration.rollout.rollout_kit import Stage
from tests.integration.rollout.weight_source import with_weights
from tests.kit.models import byte_tokenizer, make_tiny_model
from tests.kit.waiting import eventually
from tests.sglang.environment import CPU_ENVIRONMENT, CPU_OPTIONS, EnvironmentUnavailable, sglang_python

LENGTH = 300
"""Minimum length of a message, in tokens: after the engine's first report of 64 there is time to pause it."""
STOPS = [2, *range(3, 200)]
"""Tokens that end a message: after its minimum length it ends soon."""
BEFORE, AFTER = 1, 2
"""Versions before and after the synchronisation."""
PATIENT = '''
from pathlib import Path

class Patient:
    """Notes when it is opened and asked."""

    def __init__(self, notes):
        self.notes = Path(notes)

    def note(self, what):
        with self.notes.open("a") as file:
            file.write(what + "\\n")

    def open(self, sample):
        self.note("open")

    def step(self, reply):
        self.note("step")
        return "go on", 0.5
'''


@pytest.fixture
def stage(
    request: pytest.FixtureRequest, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stage]:
    """The engine named by the test, and its weights."""
    engine, options = request.param, {}
    if engine == "sglang":
        try:
            python = sglang_python()
        except EnvironmentUnavailable as error:
            pytest.skip(str(error))
        for name, value in {**CPU_ENVIRONMENT, "RELAXD_ENGINE_PYTHON": python}.items():
            monkeypatch.setenv(name, value)
        options = {"sglang": CPU_OPTIONS, "memory_fraction": 0.3}
    model = make_tiny_model(tmp_path / "model", architecture="qwen3", max_position_embeddings=2048)
    byte_tokenizer().save_pretrained(model)
    stage = Stage(model, redis_url, tmp_path, engine=engine, **options)
    yield stage
    stage.close()


def log_probs(
    models: dict[int, PreTrainedModel], held: Conversation, *, keeps_cache: bool, without_ends: bool
) -> np.ndarray:
    """Return the log-probs of the model's tokens, each under the weights of its version.

    With `keeps_cache` the keys and values of a message's earlier tokens are those of the weights that wrote them. With
    `without_ends` the tokens below the minimum length are among those that don't end a message, as in SGLang.
    """
    (sequence,) = held.sequences.values()
    own, versions = np.flatnonzero(sequence.loss_mask), sequence.versions
    tokens = torch.from_numpy(sequence.tokens).long()[None]
    found = np.zeros(len(sequence.tokens))
    for message in np.split(own, np.flatnonzero(np.diff(own) > 1) + 1):
        cache, seen = None, 0
        for version in np.unique(versions[message]):
            (part,) = np.nonzero(versions[message] == version)
            first, last = message[part[0]], message[part[-1]]
            with torch.inference_mode():
                passed = models[int(version)](tokens[:, seen:last], past_key_values=cache, use_cache=keeps_cache)
            logits = passed.logits[0].double()
            if without_ends:
                begin = message[0] - seen - 1
                logits[max(0, begin) : max(0, begin + LENGTH), STOPS] = -torch.inf
            of_tokens = logits.log_softmax(-1).gather(-1, tokens[0, seen + 1 : last + 1, None])
            found[first : last + 1] = of_tokens[first - seen - 1 :, 0].numpy()
            if keeps_cache:
                cache, seen = passed.past_key_values, last
    return found[own]


@pytest.mark.night
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("stage", "modes"),
    [("transformers", ["IN_PLACE", "ABORT", "DRAIN"]), ("sglang", ["IN_PLACE", "RETRACT", "ABORT", "DRAIN"])],
    indirect=["stage"],
    ids=["transformers", "sglang"],
)
async def test_a_conversation_goes_on_through_weight_synchronisations(
    stage: Stage, modes: list[str], tmp_path: Path
) -> None:
    """The environment isn't begun anew, and each token has the log-prob of the weights that wrote it."""
    replica, notes = stage.start_replica(), tmp_path / "notes"
    await asyncio.to_thread(stage.sync, BEFORE)
    fleet = Fleet([], versions=[])
    (tmp_path / "patient.py").write_text(PATIENT)
    models = {version: with_weights(stage.model, version) for version in (BEFORE, AFTER)}
    async with (
        service_of(f"{tmp_path}/patient.py:Patient", {"notes": str(notes)}) as address,
        fleet.serving() as engines,
    ):
        fleet.add_replica(replica.replica_id, stage.coordinator.addresses[replica.replica_id], BEFORE)
        config = config_of(address, max_turns=2)
        rollout = {"max_new_tokens": 1500, "min_new_tokens": LENGTH, "stop_token_ids": STOPS}
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})
        async with talks(config, PromptTokenizer(stage.model), engines) as conversations:
            for place, mode in enumerate(modes):
                if place:
                    await asyncio.to_thread(stage.sync, BEFORE)
                prompt, before = byte_tokenizer().encode("hello", add_special_tokens=False), engines.pieces
                talk = asyncio.create_task(conversations.hold(mode, ASKED, prompt, 7, place))
                await eventually(lambda before=before: engines.pieces > before, "the first tokens of a message")
                (paused,) = await asyncio.to_thread(stage.pause, [replica], mode)
                await asyncio.to_thread(stage.join, [replica])
                await asyncio.to_thread(stage.transfer, [replica], AFTER)
                await asyncio.to_thread(stage.resume, [replica])
                held = await talk

                assert (held.failure, held.finish, held.turns) == ("", "turns", 2), mode
                assert notes.read_text().split() == ["open", "step", "step"] * (place + 1), mode
                (sequence,) = held.sequences.values()
                own = np.flatnonzero(sequence.loss_mask)
                first, second = np.split(sequence.versions[own], np.flatnonzero(np.diff(own) > 1) + 1)
                assert len(first) > LENGTH
                if mode in ("IN_PLACE", "RETRACT"):  # else the next request may have come before the pause's end
                    assert paused == 1, mode
                assert np.unique(first).tolist() == ([BEFORE] if mode == "DRAIN" else [BEFORE, AFTER]), mode
                assert (np.diff(first) >= 0).all()
                assert np.unique(second).tolist() == [AFTER], mode
                wrote = [(one, stage.digests[one], replica.replica_id) for one in (BEFORE, AFTER)]
                assert held.receipts == wrote, mode
                masked = stage.config.rollout.engine == "sglang"
                expected = log_probs(models, held, keeps_cache=mode == "IN_PLACE", without_ends=masked)
                np.testing.assert_allclose(sequence.logprobs[own], expected, atol=1e-4, err_msg=mode)
                if mode != "DRAIN":
                    other = log_probs(models, held, keeps_cache=mode != "IN_PLACE", without_ends=masked)
                    assert np.abs(other - expected).max() > 1e-3, f"{mode}: old keys and values would be the same"
