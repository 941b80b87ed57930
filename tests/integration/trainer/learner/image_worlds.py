"""Samples whose prompts have images and videos, and ranks that compute log-probs and gradients of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from relaxd.data.vision import VisionModel, read_vision
from relaxd.media.cache import decode_png
from tests.integration.trainer.trainer_worlds import Job as LearnerJob
from tests.integration.trainer.trainer_worlds import copied, make_learner
from tests.kit.vision import Item, clip, expand_media, normal_media, picture

PROMPTS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((64, 64),),
    (),
    ((100, 60), (40, 200), (200, 150)),
    ((64, 64),),
    ((64, 96, 5), (64, 64)),
)
"""Width and height of each prompt's images in pixels, with a number of frames that of a video. The first and the fourth
prompt have the same tokens, but other pictures."""
ANSWERS = 2


def make_samples(
    vision: VisionModel, prompts: Sequence[Sequence[tuple[int, ...]]] = PROMPTS, *, swapped: bool = False
) -> list[Any]:
    """Two samples a prompt; in the second one's answer an image token was sampled.

    With `swapped`, the first two frames of videos change their places.
    """
    from services.trainer.batch.micro_batch import TrainSequence
    from services.trainer.batch.prompt_images import Image, SequenceImages

    rng, token = np.random.default_rng(0), vision.tokens.token
    samples = []
    for number, sizes in enumerate(prompts):
        items: list[Item] = [_item(*size, seed=number, swapped=swapped) for size in sizes]
        normal = normal_media(vision, items)
        images = [Image(one.sha256, one.size.grid, decode_png(one.png)) for one in normal]
        marks = (vision.tokens.video if one.kind == "video" else token for one in normal)
        short = [65, 66, *(each for mark in marks for each in (258, mark, 259)), 67, 68, 69]
        prompt = np.array(expand_media(short, normal, vision))
        laid_out = SequenceImages.of(prompt, images, vision.tokens) if images else None
        for answer in range(ANSWERS):
            tokens = rng.integers(0, 250, 5 + 3 * answer)
            if answer:
                tokens[2] = token
            mask = np.ones(len(tokens), np.uint8)
            samples.append(
                TrainSequence.from_response(
                    prompt,
                    tokens,
                    loss_mask=mask,
                    columns={
                        "rollout_logprobs": rng.normal(-5, 0.5, len(tokens)).astype(np.float32),
                        "advantages": rng.normal(0, 1, len(tokens)).astype(np.float32),
                    },
                    weight=mask.astype(np.float32),
                    images=laid_out,
                )
            )
    return samples


def _item(width: int, height: int, frames: int = 0, *, seed: int, swapped: bool) -> Item:
    if not frames:
        return picture(width, height, seed)
    found = clip(frames, width, height, seed)
    return [found[1], found[0], *found[2:]] if swapped else found


@dataclass(frozen=True)
class Job:
    """A model and settings of the trainer."""

    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    plain_positions: bool = False
    """Give tokens of media the positions of text: a control that must fail."""
    swapped: bool = False
    """Swap two frames of the videos: another control."""
    steps: int = 1
    save: Path | None = None


def run_job(job: Job, ranks: int = 1) -> dict[str, Any]:
    """Return log-probs of trained tokens, gradients by Hugging Face's names (on one rank), loss and gradient norm."""
    from services.trainer.batch.micro_batch import pack
    from services.trainer.megatron.world import leave_layout

    learner = make_learner(LearnerJob(job.model, job.settings, {"old_logprobs": "current"}), ranks)
    samples = make_samples(read_vision(job.model), swapped=job.swapped)
    rows = [pack(samples[:5]), pack(samples[5:])]
    if job.plain_positions:
        rows = [
            replace(row, positions=np.tile(np.concatenate([np.arange(len(one.tokens))[-own:] for one, own in zip(
                samples[at:], np.diff(row.cu_seqlens), strict=False)]), (3, 1)).astype(np.float32))
            for row, at in zip(rows, (0, 5), strict=True)
        ]  # fmt: skip
    result: dict[str, Any] = {"trajectory": [], "tokens": [len(row.tokens) for row in rows]}
    result["logprobs"] = np.concatenate(
        [found[row.loss_mask == 1] for found, row in zip(learner.log_probs(rows), rows, strict=True)]
    )
    result["images"] = [0 if row.images is None else len(row.images.images) for row in rows]
    if ranks == 1:
        learner.accumulate(rows)
        names = {parameter: name for name, parameter in learner._policy.named_parameters()}
        result["trained"] = {name for parameter, name in names.items() if parameter.requires_grad}
        kept = {name: parameter.detach().clone() for parameter, name in names.items()}
        for parameter in names:  # to gather gradients under Hugging Face's names
            parameter.data.copy_(parameter.main_grad if parameter.requires_grad else parameter * 0)
        result["gradients"] = copied(learner)
        for parameter, name in names.items():
            parameter.data.copy_(kept[name])
        learner.discard()
    mine = rows if learner.world.dp_size == 1 else [rows[learner.world.dp_rank]]
    for _ in range(job.steps):
        learner.accumulate(mine)
        result["trajectory"].append(learner.finish(float(sum(int(sample.loss_mask.sum()) for sample in samples))))
    result["tensors"] = copied(learner)
    if job.save:
        learner.save_hf(job.save)
    leave_layout()
    return result


if __name__ == "__main__":
    # Under its own name, or the pickled jobs would be of another class than __main__'s.
    from tests.integration.trainer.learner import image_worlds
    from tests.integration.trainer.trainer_worlds import work

    work(image_worlds.run_job)
