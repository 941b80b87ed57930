"""A training loop whose groups have images, on a real board: a restarted trainer repeats its steps from their files."""

from pathlib import Path
from typing import Any

import numpy as np

from relaxd.board import MEDIA_CONTENTS, PROMPT_MEDIA, NewGroup
from relaxd.config import RunConfig
from relaxd.data.vision import read_vision
from relaxd.media import expand, normalise_image
from relaxd.media.prompt_media import to_columns
from services.trainer.megatron.world import shut_down
from tests.integration.trainer.service_kit import Feeder, make_config
from tests.integration.trainer.training_worlds import RunJob, run_job
from tests.kit.vision import encoded, make_vision_model, picture


class ImageFeeder(Feeder):
    """Publishes two prompts with the same tokens and other pictures, and one of text."""

    def __init__(self, redis_url: str, config: RunConfig, seeds: tuple[int, int]) -> None:
        super().__init__(redis_url, config)
        self.vision, self.seeds = read_vision(Path(config.model.path)), seeds

    def publish(self, count: int = 1, trace: dict[str, str] | None = None, source: str = "") -> list[str]:
        groups = []
        for number in range(1, count + 1):
            pictures = [picture(64, 96, self.seeds[number - 1])] if number <= len(self.seeds) else []
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


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(tensor, other["tensors"][name]) for name, tensor in one["tensors"].items())
