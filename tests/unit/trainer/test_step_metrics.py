"""Statistics of a step's samples against Python's own statistics."""

import random
import statistics
from dataclasses import replace

import numpy as np
import pytest

from relaxd.media.images import ImageRule, normalise_image
from relaxd.media.prompt_media import PromptMedia, StoredMedia, to_sequence_columns
from services.trainer.loop.samples import all_samples, shown_samples
from services.trainer.loop.step_metrics import MAX_SOURCES, group_metrics, repeats, sample_statistics
from tests.kit.vision import encoded, picture
from tests.unit.trainer.sampled_groups import SAMPLES, make_group


def test_statistics_are_those_of_the_samples() -> None:
    found = group_metrics([make_group(i, source, samples) for i, (source, samples) in enumerate(SAMPLES)], step=1)
    every = [(source, *sample) for source, samples in SAMPLES for sample in samples]
    for name, place in (("reward", 1), ("response_length", 2)):
        values = [float(one[place]) for one in every]
        assert found[f"{name}_mean"] == pytest.approx(statistics.fmean(values))
        assert found[f"{name}_median"] == statistics.median(values)
        assert (found[f"{name}_min"], found[f"{name}_max"]) == (min(values), max(values))
        assert found[f"{name}_std"] == pytest.approx(statistics.pstdev(values))
    assert found["right_share"] == found["outcome/right/share"] == 3 / 7
    assert found["outcome/wrong/share"] == 4 / 7
    assert found["truncated_share"] == found["finish/length/share"] == 2 / 7
    assert found["repetition_share"] == 1 / 7
    assert found["outcome/right/response_length_mean"] == statistics.fmean([10, 7, 2])
    assert found["outcome/wrong/response_length_mean"] == statistics.fmean([30, 5, 8, 100])
    assert found["outcome/wrong/truncated_share"] == 0.5
    assert found["finish/stop/reward_mean"] == statistics.fmean([1.0, 0.25, 1.5, 1.0])
    assert found["finish/abort/response_length_mean"] == 8
    assert found["source/math/share"] == 3 / 7
    assert found["source/math/reward_mean"] == pytest.approx(1.25 / 3)
    assert found["source/math/truncated_share"] == 1 / 3
    assert found["source/a_b_c/right_share"] == 0.5
    assert not any(name.startswith("source//") for name in found)
    assert found["reward_style"] == 0.5


def test_samples_show_the_images_of_their_prompt_and_of_their_conversation() -> None:
    rule = ImageRule(16, 2, 32 * 32, 64 * 32 * 32)
    images = [StoredMedia.of(normalise_image(encoded(picture(64 + 32 * n, 64)), rule)) for n in range(6)]
    prompt, contents = PromptMedia.of_stored(images[:1]), [images[:2], [], images[1:]]
    media, stored = to_sequence_columns([[replace(one, begin=0) for one in own] for own in contents], [])
    group = make_group(0, *SAMPLES[0])
    columns = {"prompt_media": list(prompt.records), "media_contents": prompt.array}
    group = group.with_columns({**columns, "sequence_media": media, "sequence_contents": stored})
    widths = [[one["width"] for one in sample["media"]] for sample in all_samples([group], 1)]
    assert widths == [[64, 96], [64], [64, 96, 128, 160]]
    assert all("thumbnail" in one for sample in shown_samples([group], 2, 1) for one in sample["media"])


def test_parts_without_samples_have_only_a_share() -> None:
    found = sample_statistics([make_group(0, None, [(0.0, 1, "stop", "")])])
    assert {name: value for name, value in found.items() if name.startswith("outcome/right")} == {
        "outcome/right/share": 0.0
    }


def test_sources_beyond_the_limit_are_counted_together() -> None:
    more = 5
    groups = [make_group(i, f"s{i}", [(1.0, 1, "stop", "")]) for i in range(MAX_SOURCES + more)]
    found = sample_statistics(groups)
    assert len([name for name in found if name.startswith("source/") and name.endswith("/share")]) == MAX_SOURCES + 1
    assert found["source/other/share"] == pytest.approx(more / (MAX_SOURCES + more))


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ("", False),
        ("The answer is 12.", False),
        ("no no no no ", False),
        ("wait, " * 500, True),
        (" ".join(map(str, random.Random(7).sample(range(10**9), 900))), False),
        ("".join(random.Random(1).choices("abcdefgh ", k=30_000)) + "ha" * 5_000, True),
        ("ha" * 5_000 + "".join(random.Random(2).choices("abcdefgh ", k=10_000)), False),
    ],
)
def test_only_the_end_of_a_text_can_repeat(text: str, repeated: bool) -> None:
    assert repeats(text) is repeated


def test_conversations_have_metrics_of_their_own() -> None:
    of_group = [
        {"turns": [1, 3], "seconds": [0.5, 1.5], "reward": [0.0, 1.0], "info": {"calls": [2.0, None]}},
        {"turns": [2], "seconds": [0.0], "reward": [2.0], "info": {"calls": [4.0]}},
    ]
    masks = [[[1, 1, 0], [0, 0, 1, 0, 0, 1, 0, 1]], [[0, 0]]]  # what is before the model's first token is its prompt
    groups = []
    for number, (own, mask) in enumerate(zip(of_group, masks, strict=True)):
        group = make_group(number, None, [(0.0, len(one), "turns", "") for one in mask])
        columns = {
            "loss_mask": np.array([value for one in mask for value in one], np.uint8),
            "turns": np.array(own["turns"], np.int32),
            "environment_seconds": np.array(own["seconds"], np.float32),
            "outside_generation_seconds": np.array(own["seconds"], np.float32) + 0.25,
            "tool_calls": np.array(own["turns"], np.int32) * 2,
            "tool_errors": np.array(own["turns"], np.int32),
            "environment_reward": np.array(own["reward"]),
            "environment_info": own["info"],
            "response_messages": [
                [{"role": "assistant", "content": f"turn {turns}"}] for turns in np.array(own["turns"])
            ],
        }
        groups.append(group.with_columns(columns))
    found = group_metrics(groups, step=1)
    assert (found["turns_mean"], found["turns_max"]) == (2, 3)
    assert found["environment_seconds_mean"] == pytest.approx(2 / 3)
    assert (found["environment_seconds_max"], found["environment_reward_mean"]) == (1.5, 1)
    assert (found["model_tokens_mean"], found["observation_tokens_mean"]) == (5 / 3, 1)
    assert (found["tool_calls_mean"], found["tool_errors_mean"]) == (4, 2)
    assert found["outside_generation_seconds_mean"] == pytest.approx(2 / 3 + 0.25)
    assert found["outside_generation_seconds_max"] == 1.75
    assert found["environment/calls"] == 3
    (shown, *_, last) = all_samples(groups, step=1)
    assert shown["conversation"] == [{"role": "assistant", "content": "turn 1", "tool_calls": []}]
    assert (last["turns"], last["environment_reward"], last["environment_seconds"]) == (2, 2.0, 0.0)
    assert "turns_mean" not in group_metrics([make_group(0, None, SAMPLES[0][1])], step=1)
