"""The environment of a rehearsal: what it shows, and how much of it."""

import asyncio
from pathlib import Path

import pytest

from relaxd.board.sizes import MEDIA_TOKEN_BYTES
from relaxd.data.vision import normalise_shown, read_vision
from relaxd.envs.environment import Reply, read_observation
from relaxd.tools.rehearsal.stand_ins import StandInEnvironment
from tests.kit.sounds import WITH_ALL, write_omni_model


@pytest.mark.parametrize(("kind", "tokens"), [("image", 50), ("video", 300), ("audio", 50)])
def test_what_is_shown_has_its_tokens_and_nearly_as_many_bytes_as_is_possible(
    kind: str, tokens: int, tmp_path: Path
) -> None:
    write_omni_model(tmp_path)
    vision = read_vision(tmp_path, WITH_ALL)
    shown = []
    for _ in range(2):
        environment = StandInEnvironment(turns=2, seconds=0.0, spread=0.0, words=tokens, shows=kind)
        step, last = (asyncio.run(environment.step(Reply("?", ()))) for _ in range(2))
        ((_, (item,)),) = read_observation(step.observation, "step() returned")
        assert item.kind == kind
        shown.append(normalise_shown(kind, item.source, vision))
        assert not step.done
        assert last.done
        assert last.observation == " a" * tokens  # nobody reads it
    for one in shown:
        assert 0.9 * tokens <= one.size.tokens <= 1.1 * tokens
        assert 0.75 * MEDIA_TOKEN_BYTES[kind] <= len(one.content) / one.size.tokens <= MEDIA_TOKEN_BYTES[kind]
    assert shown[0].sha256 != shown[1].sha256  # a group would store it once
