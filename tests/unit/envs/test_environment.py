"""Values that an environment may return."""

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relaxd.envs import observation_media
from relaxd.envs.environment import (
    BadEnvironmentError,
    Reply,
    Sample,
    Step,
    ToolCall,
    check_step,
    check_tools,
    messages_of,
)
from relaxd.envs.loading import RelaxEnvironment
from tests.kit.cases import each
from tests.kit.vision import encoded, picture

CALLS = [ToolCall("add", {"a": 1}, id="c1"), ToolCall("add", {"a": 2}, id="c2")]
USER = {"role": "user", "content": "x"}


@each(
    ("observation", "calls", "messages"),
    [
        (None, CALLS, []),
        ("x", [], [USER]),
        ("x", CALLS[:1], [{"role": "tool", "name": "add", "tool_call_id": "c1", "content": "x"}]),
        (USER, CALLS, [USER]),
        ((USER, USER), [], [USER, USER]),
        ([], [], []),
    ],
)
def test_observations_become_messages(observation: Any, calls: list[ToolCall], messages: list[Any]) -> None:
    assert messages_of(observation, "step() returned", calls) == messages


def test_images_become_data_uris(tmp_path: Path) -> None:
    png = encoded(picture(16, 16))
    (tmp_path / "a.png").write_bytes(png)
    uri = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    items = [png, picture(16, 16), str(tmp_path / "a.png"), {"bytes": png}, uri]
    content = ["See ", *({"type": "image", "image": one} for one in items), {"type": "image_url", "image_url": uri}]
    (message,) = messages_of({"role": "tool", "content": content}, "step() returned")
    assert message["content"] == [{"type": "text", "text": "See "}, *[{"type": "image", "image": uri}] * 6]
    assert messages_of([message], "Step returned", sent=True) == [message]
    assert messages_of([USER | {"content": ["a", "b"]}], "step() returned") == [USER | {"content": "ab"}]


@each(
    ("part", "sent", "complaint"),
    [
        ({"type": "image", "image": "a.png"}, True, "is no data URI"),
        ({"type": "image", "image": "/no/a.png"}, False, "which is no file here"),
        ({"type": "image", "image": "https://user:secret@host/a.png"}, False, "is a URL of host: relaxd fetches no"),
        ({"type": "image"}, False, "has no item"),
        ({"type": "video", "video": "a.mp4"}, False, "is 'a.mp4', which is no file here"),
        (7, False, "is no part: there are only text, images, video and sound"),
    ],
)
def test_images_that_cannot_be_read_are_refused(part: Any, sent: bool, complaint: str) -> None:
    message = {"role": "user", "content": ["Look", part]}
    with pytest.raises(BadEnvironmentError) as refused:
        messages_of([USER, message], "step() returned", sent=sent)
    assert str(refused.value).startswith("step() returned messages of which messages[1].content[1] ")
    assert complaint in str(refused.value)
    assert "secret" not in str(refused.value)


def test_images_of_relax_come_before_their_text() -> None:
    def playing(observation: dict[str, Any]) -> RelaxEnvironment:
        made = SimpleNamespace(reset=lambda: None, step=lambda text: (observation, False, {}))
        environment = RelaxEnvironment(lambda sample, args: made, {})
        environment.open(Sample([]))
        return environment

    shown = picture(16, 16)
    step = playing({"obs_str": "see", "multi_modal_data": {"image": [shown]}}).step(Reply("x"))
    content = [{"type": "image", "image": shown}, {"type": "text", "text": "see"}]
    assert step.observation == {"role": "user", "content": content}
    step = playing({"obs_str": "hear", "multi_modal_data": {"audio": b"RIFF"}}).step(Reply("x"))
    assert step.observation["content"][0] == {"type": "audio", "audio": b"RIFF"}
    with pytest.raises(BadEnvironmentError, match="multi_modal_data of 'smell': only image, video, audio"):
        playing({"obs_str": "see", "multi_modal_data": {"smell": [b""]}}).step(Reply("x"))


def test_images_count_against_a_limit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation_media, "MAX_MEDIA_BYTES", 2000)
    large = {"role": "user", "content": [{"type": "image", "image": b"x" * 1500}] * 2}
    with pytest.raises(BadEnvironmentError, match=r"messages\[0\].content has media of more than"):
        messages_of(large, "step() returned")


def test_steps_may_be_tuples_with_numbers_of_numpy() -> None:
    info = {"hits": np.int64(3), "won": True, "why": "text"}
    step = check_step(("x", np.float32(0.5), np.bool_(True), info))
    assert step == Step([USER], 0.5, True, {"hits": 3.0, "won": 1.0})
    step = check_step(Step("x", player=np.int64(1), rewards={np.int32(0): np.float32(0.5)}))  # type: ignore[arg-type]
    assert step == Step([USER], player=1, rewards={0: 0.5})


@each(
    ("returned", "message"),
    [
        ("x", "step() returned 'x' (str): return Step(observation, reward, done, info)"),
        (("x",), "step() returned ('x',) (tuple)"),
        (("x", None), "step() returned the reward None (NoneType): it must be a finite number"),
        (("x", 10**400), "step() returned the reward a number that is too large"),
        (("x", 0.0, 1), "step() returned done = 1 (int): it must be True or False"),
        (("x", 0.0, False, 3), "step() returned info = 3 (int): it must be a dict of numbers"),
        (("x", 0.0, False, {"a": float("inf")}), "step() returned info['a'] = inf: it must be a finite number"),
        (Step(player=-1), "step() returned player = -1 (int): it must be a number from 0 to agent.players - 1"),
        (Step(rewards={"a": 1.0}), "step() returned rewards for the player 'a' (str): it must be a number from 0"),  # type: ignore[dict-item]
        (Step(rewards={1: float("nan")}), "step() returned rewards[1] = nan: it must be a finite number"),
        ((["x"], 0.0), "step() returned the message 'x' (str): it must be like"),
        (({"content": "x"}, 0.0), "step() returned the message {'content': 'x'} (dict): it must be like"),
        ((["x" * (1 << 20)], 0.0), "step() returned the message 'xxx"),
        (([USER | {"content": "x" * (1 << 19)}] * 3, 0.0), "step() returned messages with 1572"),
        (([USER | {"more": object()}], 0.0), "step() returned messages with what JSON can't have"),
    ],
)
def test_bad_steps_are_refused_by_name(returned: Any, message: str) -> None:
    with pytest.raises(BadEnvironmentError) as refused:
        check_step(returned)
    assert message in str(refused.value)


def test_bad_tools_are_refused_by_name() -> None:
    with pytest.raises(BadEnvironmentError, match=r"the environment has the tool 'add' \(str\): it must be like"):
        check_tools(["add"])
    with pytest.raises(BadEnvironmentError, match="the environment has tools = 'add'"):
        check_tools("add")
