"""A training loop whose groups have images, on a real board: a restarted trainer repeats its steps from their files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxd.board import MEDIA_CONTENTS, PROMPT_MEDIA, SEQUENCE_CONTENTS, SEQUENCE_MEDIA, NewGroup
from relaxd.config import RunConfig
from relaxd.data.vision import read_vision
from relaxd.media.images import normalise_image
from relaxd.media.media_tokens import expand
from relaxd.media.prompt_media import StoredMedia, to_columns, to_sequence_columns
from tests.integration.trainer.service_kit import Feeder, make_config
from tests.integration.trainer.training_worlds import RunJob, run_job
from tests.kit.megatron_world import shut_down
from tests.kit.processes import run_python
from tests.kit.vision import encoded, make_vision_model, picture


class ImageFeeder(Feeder):
    """Publishes two prompts with the same tokens and other pictures, then prompts of text."""

    def __init__(self, redis_url: str, config: RunConfig, seeds: tuple[int, int]) -> None:
        super().__init__(redis_url, config)
        self.vision, self.seeds = read_vision(Path(config.model.path)), seeds
        self.first = 1
        """Number of the next group."""

    def publish(self, count: int = 1, trace: dict[str, str] | None = None, source: str = "") -> list[str]:
        groups = []
        for place in range(count):
            number = self.first + place
            pictures = [picture(64, 96, self.seeds[place])] if place < len(self.seeds) else []
            images = [normalise_image(encoded(one), self.vision.rule) for one in pictures]
            short = [5, *[self.vision.tokens.token] * len(images), 6, 7]
            media, contents = to_columns(images)
            columns = {
                "prompt_tokens": expand(short, [one.size.grid for one in images], self.vision.tokens),
                "prompt": {"text": "", "answer": "", "metadata": {"data_source": "s"}, "index": number},
                PROMPT_MEDIA: media,
                MEDIA_CONTENTS: contents,
            }
            groups.append(NewGroup(f"g{number}", columns, trace or {}))
        return self.board.publish(term=1, groups=groups)


class ConversationFeeder(ImageFeeder):
    """Has the same prompts, in whose groups an environment shows a picture.

    The first sample goes on from the prompt; the second one has a prompt of its own, with the same picture.
    """

    shown = 5
    """Seed of the pictures that are shown."""

    def _answers(self, group_id: str, version: int, length: int) -> dict[str, Any]:
        columns = super()._answers(group_id, version, length)
        image = normalise_image(encoded(picture(64, 96, self.shown)), self.vision.rule)
        seen = expand([9, self.vision.tokens.token, 8], [image.size.grid], self.vision.tokens).astype(np.int32)
        written = columns["tokens"].reshape(2, length)
        tokens = np.concatenate([written[0, :2], seen, written[0, 2:], seen, written[1]])
        mask = np.concatenate([np.ones(2), 0 * seen, np.ones(length - 2), 0 * seen, np.ones(length)])
        placed = [[replace(StoredMedia.of(image), begin=begin)] for begin in (3, 1)]
        media, contents = to_sequence_columns(placed, [])
        counts = {name: np.ones(2, np.int32) for name in ("turns", "tool_calls", "tool_errors")}
        seconds = ("environment_seconds", "outside_generation_seconds")
        return columns | {
            "tokens": tokens,
            "lengths": np.full(2, length + len(seen), np.int32),
            "shares_prompt": np.array([1, 0], np.uint8),
            "loss_mask": mask.astype(np.uint8),
            "rollout_logprobs": np.full(len(tokens), -5.5, np.float32),
            "versions": np.full(len(tokens), version, np.int64),
            SEQUENCE_MEDIA: media,
            SEQUENCE_CONTENTS: contents,
            "response_messages": [[{"role": "assistant", "content": "answer"}]] * 2,
            "environment_reward": np.zeros(2),
            "environment_info": {},
            **counts,
            **{name: np.zeros(2, np.float32) for name in seconds},
        }

    def _advantages(self, length: int, least: float, largest: float) -> dict[str, Any]:
        image = normalise_image(encoded(picture(64, 96, self.shown)), self.vision.rule)
        seen = 2 + self.vision.tokens.count(image.size.grid)
        return super()._advantages(length + seen, least, largest)


def test_a_run_trains_on_images_and_repeats_its_steps(redis_url: str, tmp_path: Path, alone: None) -> None:
    config = make_config(
        make_vision_model(tmp_path / "model"),
        run={"steps": 1},
        data={"source": "files", "path": "prompts.jsonl", "media_keys": {"image": "images"}},
        trainer={"groups_per_step": 3, "checkpoint": {"every": 0}, "freeze": []},
        algorithm={"kl_coef": 0.1},
    )

    def prepared(number: int, seeds: tuple[int, int]) -> RunJob:
        url = redis_url.removesuffix("/0") + f"/{number}"
        (tmp_path / str(number)).mkdir()
        feeder = ImageFeeder(url, config, seeds)
        feeder.feed(3, 0)
        feeder.board.close()
        return RunJob(config, url, tmp_path / str(number))

    job = prepared(1, (0, 1))
    trained = run_job(job)
    (entry,) = trained["ledger"]
    assert np.isfinite(entry.metrics["loss"])
    assert entry.metrics["kl"] < 1e-6, "the reference, which sees the same images, has the same log-probs"
    shut_down()
    again = run_job(job)
    assert _same(again, trained)
    shut_down()
    other = run_job(prepared(2, (0, 0)))
    assert not _same(other, trained), "the second prompt's picture counts"


@pytest.mark.slow
def test_a_conversations_pictures_are_repeated_and_replayed_from_step_files(
    redis_url: str, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        make_vision_model(tmp_path / "model"),
        run={"steps": 2},
        data={"source": "files", "path": "prompts.jsonl", "media_keys": {"image": "images"}},
        agent={"environment": "zoom"},
        rollout={"max_new_tokens": 64},
        trainer={"groups_per_step": 3, "checkpoint": {"every": 0}, "freeze": []},
    )

    def prepared(number: int) -> RunJob:
        url, folder = redis_url.removesuffix("/0") + f"/{number}", tmp_path / str(number)
        folder.mkdir()
        feeder = ConversationFeeder(url, config, (0, 1))
        for step in range(2):
            feeder.first = 1 + 3 * step
            feeder.feed(3, 0)
        feeder.board.close()
        (folder / "config.json").write_text(config.model_dump_json())
        return RunJob(config, url, folder)

    job = prepared(1)
    trained = run_job(job)
    metrics = [entry.metrics for entry in trained["ledger"]]
    assert [len(entry.plan["groups"]) for entry in trained["ledger"]] == [3, 3]
    shut_down()
    assert _same(run_job(job), trained)
    shut_down()
    lines = [json.dumps({"step": step, **own}) + "\n" for step, own in enumerate(metrics, 1)]
    (job.folder / "metrics.jsonl").write_text("".join(lines))
    replayed = run_python("-m", "services.trainer.offline.replay", "--run-folder", str(job.folder), "--step", "2")
    assert replayed.returncode == 0, replayed.stderr + replayed.stdout
    numbers = json.loads(replayed.stdout)["numbers"]
    assert numbers["weights_checksum"]["recorded"] == metrics[1]["weights_checksum"]
    assert all(number["replayed"] == number["recorded"] for number in numbers.values()), numbers

    monkeypatch.setattr(ConversationFeeder, "shown", 6)
    other = run_job(prepared(2))
    assert not _same(other, trained), "the shown pictures count"


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(tensor, other["tensors"][name]) for name, tensor in one["tensors"].items())
