"""Bundled rewards, how they are found, and what counts as a reward at all."""

import math
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from relaxd.media.messages import text_and_media, to_proto, with_parts
from relaxd.media.prompt_media import PromptMedia, with_references
from relaxd.media.sounds import SoundRule
from relaxd.media.videos import BlockRule, normalise_video
from relaxd.rewards import (
    REWARDS,
    BadRewardError,
    RewardInput,
    UnknownRewardError,
    check_name,
    check_output,
    describe,
    resolve,
)
from relaxd.rewards.hub.environment import environment
from relaxd.rewards.interface import text_message
from services.reward.samples import request_of_samples, samples_of_columns, samples_of_request
from tests.kit.cases import each
from tests.kit.sounds import sound
from tests.kit.vision import clip, encoded_clip


@each("value", [1, 0.5, True, np.float32(0.5), np.float64(0.5), np.int64(3), Fraction(1, 2)])
def test_numbers_are_rewards(value):
    assert check_output(value).reward == float(value)


def test_a_mapping_has_a_reward_and_parts():
    output = check_output({"reward": np.float32(0.5), "accuracy": 1})
    assert (output.reward, output.parts) == (0.5, {"accuracy": 1.0})


@each(
    ("value", "message"),
    [
        (math.nan, "it must be finite"),
        (-math.inf, "it must be finite"),
        (np.float32("nan"), "it must be finite"),
        (10**400, "too large"),
        ("1", "it must be a number"),
        (None, "it must be a number"),
        ([1.0], "it must be a number"),
        (np.array([1.0, 2.0]), "it must be a number"),
        (1j, "it must be a number"),
        (Decimal(1), "it must be a number"),
        ({"accuracy": 1}, 'without "reward"'),
        ({"reward": None}, "the reward is None"),
        ({"reward": 1, "format": math.nan}, "part 'format' of the reward is nan"),
        ({"reward": 1, 3: 1}, "a part named 3"),
    ],
)
def test_anything_else_is_no_reward(value, message):
    with pytest.raises(BadRewardError, match=message):
        check_output(value)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownRewardError, match=r'unknown reward "additon": did you mean addition\?'):
        resolve("additon")
    for name in ("zzz", "", "a:b:c", ":f", "m:", "a..b:f", "a b:f"):
        with pytest.raises(UnknownRewardError, match="bundled are addition, code, dapo"):
            check_name(name)


def test_a_reward_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("LIMIT = 3\ndef length(sample):\n    return len(sample.response)\n")
    (tmp_path / "broken_rewards.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("my_rewards:length")(RewardInput(prompt="", response="abc")) == 3
    with pytest.raises(UnknownRewardError, match="has no lenght; did you mean length"):
        resolve("my_rewards:lenght")
    with pytest.raises(UnknownRewardError, match="LIMIT is a int, not a function"):
        resolve("my_rewards:LIMIT")
    with pytest.raises(UnknownRewardError, match="cannot be imported: RuntimeError: no licence"):
        resolve("broken_rewards:length")
    with pytest.raises(UnknownRewardError, match="cannot be imported: ModuleNotFoundError"):
        resolve("absent_rewards:length")
    sys.modules.pop("my_rewards")


def test_every_bundled_reward_describes_itself():
    for name, reward in REWARDS.items():
        assert describe(name).endswith(".") or ":" in describe(name) or "," in describe(name), name
        named = reward.__name__.lower().removesuffix("reward")
        assert named == (name if named == reward.__name__ else name.replace("_", "")), (
            "a class is named like its reward"
        )


# --- messages -----------------------------------------------------------------------------------------------------


def test_text_alone_is_a_question_and_an_answer_and_costs_nothing_more():
    sample = RewardInput(prompt="1 + 2?", response="3")
    assert sample.messages == [text_message("user", "1 + 2?"), text_message("assistant", "3")]
    assert (sample.prompt_messages, sample.response_messages) == ((), ())
    request = to_proto([text_message("user", "1 + 2?")])
    assert text_and_media(request, "user") == ("1 + 2?", ())
    assert request[0].ByteSize() == len("1 + 2?") + 10


def test_messages_with_media_survive_the_wire():
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "audio", "uri": "s3://a.wav", "media_type": "", "sha256": "0f" * 32}]},
        {"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "is this?"}]},
    ]
    text, found = text_and_media(to_proto(messages), "user")
    assert text == "What\nis this?"
    assert found == (text_message("system", "Be kind."), *messages[1:]) == with_parts(messages)


def test_a_message_without_content_has_no_parts_and_the_assistants_beginning_is_no_question():
    called = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [1]}]
    ended = [*called, {"role": "tool", "content": "ok"}, {"role": "assistant", "content": "<think>"}]
    expected = (text_message("user", "hi"), {"role": "assistant", "content": []}, text_message("tool", "ok"))
    text, found = text_and_media(to_proto(ended), "user")
    assert (text, found) == ("ok", (*expected, text_message("assistant", "<think>")))
    assert found == with_parts(ended)
    assert text_and_media(to_proto(ended), "assistant")[0] == "<think>"


def test_the_response_of_a_conversation_is_the_models_last_message():
    said = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "Are you sure?"}]
    for messages, expected in ((said, "4"), ([*said, {"role": "assistant", "content": "5"}], "5"), (said[1:], "")):
        assert text_and_media(to_proto(messages), "assistant") == (expected, with_parts(messages))


def test_rewards_get_the_media_of_the_messages_and_no_others():
    rule = BlockRule(16, 2, 4096, 65536, times=2, fps=2.0, min_frames=4, max_frames=16, sound=SoundRule(5.0))
    video = normalise_video(encoded_clip(clip(4, 64, 64), 2, samples=sound(1.5)), rule)
    assert len(video.size.grid) == 4
    media = PromptMedia.of([video])
    columns = {
        "prompt": {
            "text": "",
            "messages": with_references([{"role": "user", "content": [{"type": "video"}]}], [video]),
        },
        "prompt_media": list(media.records),
        "media_contents": media.array,
        "sample_of_sequence": np.array([0], np.int32),
        "lengths": np.array([1], np.int32),
        "loss_mask": np.array([1], np.uint8),
        "text": ["4"],
        "finish": ["stop"],
    }
    (sample,) = samples_of_columns(columns)
    assert sample.media == {video.sha256: video.content}
    assert [part["sha256"] for part in sample.prompt_messages[0]["content"]] == list(sample.media)
    assert len(sample.videos()[0]) == 4


def test_a_sample_of_several_sequences_is_scored_by_its_last_answer():
    columns = {
        "prompt": {
            "text": "go on",
            "messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "go on"}],
        },
        "sample_of_sequence": np.array([0, 0, 1], np.int32),
        "lengths": np.array([2, 3, 1], np.int32),
        "loss_mask": np.array([1, 1, 1, 0, 1, 1], np.uint8),
        "text": ["first", "last", "other"],
        "finish": ["stop", "length", "stop"],
    }
    first, other = samples_of_columns(columns)
    assert (first.response, first.finish_reason, other.response, other.finish_reason) == (
        "last",
        "length",
        "other",
        "stop",
    )
    assert (first.tokens, other.tokens) == (4, 1)
    asked = [text_message("user", "hi"), text_message("user", "go on")]
    assert first.messages == [*asked, text_message("assistant", "first"), text_message("assistant", "last")]
    assert other.messages == [*asked, text_message("assistant", "other")]
    first, other = samples_of_columns(columns | {"lengths": np.array([3, 3, 0], np.int32)})
    assert (first.tokens, other.tokens) == (5, 0)  # such as a conversation that failed at its beginning
    with pytest.raises(ValueError, match="3 texts, 2 finish and 3 sample_of_sequence differ"):
        samples_of_columns(columns | {"finish": ["stop", "stop"]})


def test_rewards_get_what_the_environment_gave():
    conversations = [
        [
            {"role": "assistant", "content": "1+1"},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "2"},
        ],
        [{"role": "assistant", "content": "3"}],
    ]
    columns = {
        "prompt": {"text": "1+1?"},
        "sample_of_sequence": np.array([0, 1], np.int32),
        "lengths": np.array([4, 1], np.int32),
        "loss_mask": np.array([1, 0, 0, 1, 1], np.uint8),
        "text": ["2", "3"],
        "finish": ["env_done", "turns"],
        "response_messages": conversations,
        "environment_reward": np.array([1.5, -1.0]),
        "environment_info": {"calls": [1.0, None]},
    }
    samples = samples_of_columns(columns)
    assert [sample.finish_reason for sample in samples] == ["env_done", "turns"]
    assert [message["role"] for message in samples[0].response_messages] == ["assistant", "tool", "assistant"]
    assert samples[0].response_messages[1] == text_message("tool", "2")
    assert [sample.environment_info for sample in samples] == [{"calls": 1.0}, {}]
    assert [environment(sample) for sample in samples] == [1.5, -1.0]
    again = samples_of_request(request_of_samples("environment", samples))
    assert [(one.environment_reward, one.environment_info) for one in again] == [(1.5, {"calls": 1.0}), (-1.0, {})]
    assert [one.finish_reason for one in again] == ["env_done", "turns"]
    with pytest.raises(ValueError, match=r"set agent\.environment"):
        environment(RewardInput("1+1?", "2"))
