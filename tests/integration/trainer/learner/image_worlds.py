"""Samples whose prompts have images and videos, and ranks that compute log-probs and gradients of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from relaxd.data.vision import VisionModel, read_vision
from relaxd.media.kinds import MEDIA_KINDS
from relaxd.media.sounds import decode_wav
from relaxd.media.videos import NormalVideo, own_sound
from tests.integration.trainer.trainer_worlds import HYBRID, copied, make_learner
from tests.integration.trainer.trainer_worlds import Job as LearnerJob
from tests.kit.sounds import sound
from tests.kit.vision import (
    EXPERTS,
    TOKENS,
    TOWER,
    Item,
    SoundClip,
    clip,
    expand_media,
    mark_of,
    normal_media,
    picture,
    write_vision_model,
)

PROMPTS: tuple[tuple[tuple[float, ...], ...], ...] = (
    ((64, 64),),
    (),
    ((100, 60), (40, 200), (200, 150)),
    ((64, 64),),
    ((64, 96, 5), (64, 64)),
)
"""Width and height of each prompt's images in pixels, with a number of frames that of a video. The first and the fourth
prompt have the same tokens, but other pictures."""
HEARD: tuple[tuple[tuple[float, ...], ...], ...] = (
    ((1.31,),),
    (),
    ((100, 60), (0.43,), (1.1,)),
    ((1.31,),),
    ((2.05,), (64, 96), (64, 96, 4), (1.31,)),
    ((64, 64, 6, 1.31), (0.43,)),
)
"""The same for a model that hears, too: one number is the length of a sound in seconds, a fourth one that of a video's
own sound."""
ANSWERS = 2


def make_hybrid_model(folder: Path, model_type: str) -> Path:
    """Write a tiny random Qwen3.5, dense or with experts, whose tower is that of Qwen3-VL without DeepStack."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = Tokenizer.from_file(str(write_vision_model(folder, model_type) / "tokenizer.json"))
    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
    # With square tensors of experts, which a reader could take for transposed ones.
    experts = {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 80}
    own = experts if model_type == "qwen3_5_moe" else {}
    text = {
        **HYBRID,
        **own,
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
    }
    tower = {name: value for name, value in TOWER.items() if name != "deepstack_visual_indexes"}
    ids = {name: tokenizer.token_to_id(token) for name, token in TOKENS.items()}
    sections = {"text_config": text, "vision_config": tower}
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(model_type, **sections, tie_word_embeddings=True, **ids)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, save_original_format=False)  # with stacked experts, as they are published
    return folder


def make_samples(
    vision: VisionModel, prompts: Sequence[Sequence[tuple[float, ...]]] = (), *, swapped: bool = False
) -> list[Any]:
    """Two samples a prompt; in the second one's answer a token of media was sampled.

    With `swapped`, the first two frames of videos change their places, and sounds are others of the same lengths.
    """
    from services.trainer.batch.micro_batch import TrainSequence
    from services.trainer.batch.sequence_media import DecodedItem, SequenceMedia

    rng = np.random.default_rng(0)
    token = vision.tokens.token if vision.sound is None else vision.tokens.audio
    samples = []
    for number, sizes in enumerate(prompts or (PROMPTS if vision.sound is None else HEARD)):
        items: list[Item] = [_item(*size, seed=number, swapped=swapped) for size in sizes]
        normal = normal_media(vision, items)
        images = [
            DecodedItem(
                one.sha256,
                one.size.grid,
                MEDIA_KINDS[one.kind].open(one.content),
                one.kind,
                one.size.times,
                decode_wav(own_sound(one.content)) if isinstance(one, NormalVideo) and len(one.size.grid) > 3 else None,
            )
            for one in normal
        ]
        short = [65, 66, *(each for one in normal for each in _marked(one.kind, vision)), 67, 68, 69]
        prompt = np.array(expand_media(short, normal, vision))
        laid_out = SequenceMedia.of(prompt, images, vision.tokens) if images else None
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
                    media=laid_out,
                )
            )
    return samples


def _marked(kind: str, vision: VisionModel) -> tuple[int, int, int]:
    """Return the token of a kind of media between its marks, as the template writes them."""
    before, behind = (258, 259) if vision.sound is None else {"audio": (263, 264)}.get(kind, (261, 262))
    return before, mark_of(kind, vision), behind


def _item(first: float, height: float = 0, frames: float = 0, seconds: float = 0, *, seed: int, swapped: bool) -> Item:
    if not height:
        return sound(first, seed + 100 * swapped)
    width, high = int(first), int(height)
    if not frames:
        return picture(width, high, seed)
    found = clip(int(frames), width, high, seed)
    if seconds:
        return SoundClip(found, sound(seconds, seed + 100 * swapped))
    return [found[1], found[0], *found[2:]] if swapped else found


@dataclass(frozen=True)
class Job:
    """A model and settings of the trainer."""

    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    plain_positions: bool = False
    """Give tokens of media the positions of text: a control that must fail."""
    swapped: bool = False
    """Swap two frames of the videos, or have other sounds: another control."""
    steps: int = 1
    save: Path | None = None


def run_job(job: Job, ranks: int = 1) -> dict[str, Any]:
    """Return log-probs of trained tokens, gradients by Hugging Face's names (on one rank), loss and gradient norm."""
    from services.trainer.batch.micro_batch import pack
    from tests.kit.megatron_world import leave_layout

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
    result["images"] = [0 if row.media is None else len(row.media.items) for row in rows]
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
    outputs = learner._policy.tower_outputs
    result["tower_runs"], result["tower_asked"] = outputs.runs, outputs.asked
    result["tensors"] = copied(learner)
    if job.save:
        learner.save_hf(job.save)
    leave_layout()
    return result


def check_tensors(ranks: Sequence[dict[str, Any]], expected: dict[str, Any], way: str) -> None:
    """Check that the ranks' jobs ended with the weights of one rank's."""
    assert {name for rank in ranks for name in rank["tensors"]} == expected["tensors"].keys(), way
    for rank in ranks:
        for name, tensor in rank["tensors"].items():
            # A fifth of the learning rate, since Adam makes steps of its size from gradients that are all rounding.
            np.testing.assert_allclose(tensor, expected["tensors"][name], rtol=0, atol=2e-3, err_msg=f"{way} {name}")
