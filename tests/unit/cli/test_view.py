"""What a run looks like: everything is shown, whatever the model writes."""

import base64
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from relaxd.cli.execute import result_table
from relaxd.cli.reading.live_view import Picture, RunView, samples_table, sparkline, step_line
from relaxd.media.images import ImageRule, normalise_image
from relaxd.media.prompt_media import PromptMedia
from relaxd.media.shown import THUMBNAIL_URI, shown_media, shown_message
from relaxd.media.videos import VideoRule, normalise_video
from relaxd.report.run_result import sample_values
from relaxd.v1 import coordinator_pb2 as pb
from services.coordinator.runs.run_messages import sample_message
from tests.kit.cases import each
from tests.kit.vision import encoded


def shown(renderable: object, width: int = 140) -> str:
    text = io.StringIO()
    Console(file=text, width=width, markup=False).print(renderable)
    return text.getvalue()


def message(step: int, **metrics: float) -> pb.WatchRunResponse:
    run = pb.Run(run_id="r1", state=pb.RUN_STATE_RUNNING, step=step, steps=24, reason="training")
    run.groups.published, run.groups.open, run.groups.trained, run.groups.dropped = 14, 4, 8, 2
    run.groups.dropped_by_reason["zero_variance"] = 2
    run.queues.add(stage="reward", waiting=1, held=2)
    return pb.WatchRunResponse(run=run, steps=[pb.StepMetrics(step=step, metrics=metrics)])


def test_the_live_picture_has_everything() -> None:
    view = RunView()
    assert view.update(message(1, reward_mean=0.25, staleness_mean=0.5, tokens_per_second=321.0)) == [1]
    assert view.update(message(1, reward_mean=0.25, staleness_mean=0.5, tokens_per_second=321.0)) == []
    response = "[/not markup]\n7777777777 \x1b[2J\x07"
    view.samples = [pb.TrainedSample(step=1, prompt="What is 3 + 4?", response=response, answer="7", advantage=-0.5)]
    text = shown(Picture(view))
    for expected in ("r1", "running", "step 1/24", "0.250", "0.50", "321", "published 14", "zero_variance 2"):
        assert expected in text
    for expected in ("reward 1+2", "What is 3 + 4?", "[/not markup] 7777777777 \\u001b[2J\\u0007", "-0.50"):
        assert expected in text
    assert "accuracy" not in text  # this run has no such metric


def test_conversations_are_shown_turn_by_turn() -> None:
    messages = [
        pb.ShownMessage(role="assistant", content="Let me <see>\x1b[2J", tool_calls=['add {"a": 1}']),
        pb.ShownMessage(role="tool", content="[/1]"),
        pb.ShownMessage(role="assistant", content="It is 1"),
    ]
    sample = pb.TrainedSample(
        step=1, prompt="0 + 1?", response="It is 1", finish_reason="env_done", conversation=messages, turns=2,
        environment_reward=0.5, environment_seconds=0.25,
    )  # fmt: skip
    lines = ["[assistant] Let me <see>\\u001b[2J", '-> add {"a": 1}', "[tool] [/1]", "[assistant] It is 1"]
    text = re.sub(r"\s+", " ", shown(samples_table([sample]), width=200))
    for line in lines:
        assert line in text
    assert "(2 turns, env_done; the environment paid 0.5 and" in text
    assert "[tool]" not in shown(samples_table([sample], one_line=True), width=200)
    assert sample_values(sample)["conversation"][1] == {"role": "tool", "content": "[/1]", "tool_calls": []}
    assert "conversation" not in sample_values(pb.TrainedSample(response="7"))


def test_long_messages_are_cut_and_media_are_named() -> None:
    content = [{"type": "text", "text": "x" * 20_000}, {"type": "image"}]
    found = shown_message({"role": "user", "content": content})
    assert len(found["content"]) < 10_100
    assert found["content"].endswith("x\n<image>")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "ü"}}}
    found = shown_message({"role": "assistant", "content": None, "tool_calls": [call]})
    assert found == {"role": "assistant", "content": "", "tool_calls": ['add {"a": "ü"}']}


@each("width", [80, 120])
@each("height", [16, 24, 50])
def test_the_live_picture_fits_the_terminal(width: int, height: int) -> None:
    view = RunView()
    for step in range(1, 31):
        latest = message(step, reward_mean=0.5, reward_accuracy=0.5, reward_format=1.0, response_length_mean=123.4,
                         staleness_mean=0.51, tokens_per_second=12345.0, step_seconds=12.3)  # fmt: skip
        latest.run.metrics.update({"eval_reward": 0.5, "eval_accuracy": 0.5, "eval_format": 1.0})
        latest.run.waiting_for = "the gate is shut: 40 groups are open, of 40 that the versions on the engines allow"
        latest.events.add(instance=f"rollout-{step}", text="is gone: its process ended with signal 9")
        view.update(latest)
    view.notices.append("relaxd resume r1 continues it, relaxd stop r1 ends it")
    view.samples = [
        pb.TrainedSample(step=30, prompt="What is 1 + 2? " * 20, response="It is\n3. " * 20, answer="3")
    ] * 4
    console = Console(file=io.StringIO(), width=width, height=height)
    rows = console.render_lines(Picture(view), console.options.update(height=height), pad=False)
    lines = ["".join(segment.text for segment in row) for row in rows]
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert not set(text) & set("╭─│╰┃┏")
    for expected in ("step 30/24", "tokens/s", "12345", "held-out reward 0.50", "published 14", "rollout-30: is gone",
                     "relaxd resume r1"):  # fmt: skip
        assert expected in text
    assert sum("12345" in line for line in lines) in {16: (1, 2), 24: (8,), 50: (8,)}[height]
    assert "What is 1 + 2?" in text or height == 16


def test_a_picture_before_anything_happened() -> None:
    assert "relaxd" in shown(Picture(RunView()))
    assert "(nothing)" in shown(samples_table([pb.TrainedSample()]))


def test_a_step_as_a_line() -> None:
    line = step_line(3, 24, {"reward_mean": 0.5, "step_seconds": 9.81, "other": 1.0})
    assert line == "step  3/24  reward 0.500  seconds 9.8"


def test_sparkline_is_cut_to_its_range() -> None:
    assert sparkline([-1.0, 0.0, 0.5, 1.0, 9.0]) == "▁▁▅██"


def test_what_a_run_waits_for_is_shown_with_the_time_that_is_left() -> None:
    view = RunView()
    view.update(message(1, reward_mean=0.25))
    view.run.waiting_for, view.run.remaining_seconds = "the trainer works on step 2, for 50 s", 600
    text = shown(Picture(view))
    assert "step 1/24; 26 s a step; about 10 min left" in text
    assert "the trainer works on step 2, for 50 s" in text


@pytest.mark.parametrize("evaluated", [True, False])
def test_the_final_table_shows_the_reward_where_nothing_was_held_out(evaluated: bool, tmp_path: Path) -> None:
    summary = {"run_id": "r1", "state": "stopped", "steps": 10, "published": 40, "dropped": 10}
    summary |= {"dropped_by_reason": {"zero_variance": 8, "stale": 2}}
    summary |= {"accuracy_before": 0.1, "accuracy_after": 0.6} if evaluated else {}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    lines = [{"step": step, "reward_mean": step / 10} for step in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = re.sub(r"[\s│]+", " ", shown(result_table(tmp_path)))
    assert ("training reward 0.300 0.800 +0.500" in text) is not evaluated
    assert "zero_variance 8 (20%) stale 2 (5%)" in text


def test_images_have_thumbnails_and_are_named_on_a_terminal() -> None:
    picture = Image.new("RGB", (640, 64), "red")
    image = normalise_image(encoded(picture), ImageRule(16, 2, 32 * 32, 1024 * 1024))
    media = PromptMedia.of([image] * 6)
    found = shown_media(media.by_hash(), media.records, previews=True)[image.sha256]
    assert found.items() >= {"sha256": image.sha256, "width": 640, "height": 64}.items()
    with Image.open(io.BytesIO(base64.b64decode(found["thumbnail"].removeprefix(THUMBNAIL_URI)))) as thumbnail:
        assert thumbnail.size == (96, 10)
    assert "thumbnail" not in shown_media(media.by_hash(), media.records, previews=False)[image.sha256]
    sample = sample_message({"prompt": "<image>?", "media": [found]})
    assert f"image {image.sha256[:8]}, 640 x 64" in shown(samples_table([sample]), width=200)
    assert "640 x 64" not in shown(samples_table([sample], one_line=True), width=200)
    assert sample_values(sample)["media"][0]["thumbnail"] == found["thumbnail"]
    frames = [encoded(Image.new("RGB", (64, 32), color)) for color in ("red", "red", "blue", "blue", "blue", "lime")]
    video = normalise_video(frames, VideoRule(16, 2, 4096, 1 << 20, times=2, fps=2.0, min_frames=4, max_frames=8))
    of_video = PromptMedia.of([video])
    clip = shown_media(of_video.by_hash(), of_video.records, previews=True)[video.sha256]
    assert (clip["width"], clip["height"], clip["frames"]) == (64, 32, 6)
    with Image.open(io.BytesIO(base64.b64decode(clip["thumbnail"].removeprefix(THUMBNAIL_URI)))) as thumbnail:
        assert thumbnail.size == (4 * 64, 32)
        colors = [max(range(3), key=lambda one, at=at: thumbnail.getpixel((64 * at + 32, 16))[one]) for at in range(4)]
        assert colors == [0, 0, 2, 1]  # of frames 0, 1, 3 and 5
    sample = sample_message({"prompt": "<video>?", "media": [clip]})
    assert f"video {video.sha256[:8]}, 64 x 32, 6 frames" in shown(samples_table([sample]), width=200)
    assert sample_values(sample)["media"] == [{**clip, "seconds": 0.0, "excerpt": ""}]
    sample = sample_message(
        {"prompt": "<audio>?", "media": [{"sha256": "cd" * 32, "seconds": 1.5, "excerpt": "data:"}]}
    )
    assert "sound cdcdcdcd, 1.50 s" in shown(samples_table([sample]), width=200)
    assert sample_values(sample)["media"][0]["excerpt"] == "data:"
