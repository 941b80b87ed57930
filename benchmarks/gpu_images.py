"""The cost of images in a training step: the same tokens as text and with images, in one run on one GPU.

    python -m benchmarks.gpu_images

Qwen3-VL 2B with random weights in bfloat16, its tower frozen. A micro-batch has 16,384 tokens: 8 sequences whose
prompts begin with an image of 1,024 tokens each, or two groups of 4 that share one each. "text" has other tokens in
their place, "images" runs the tower, and "kept" has its outputs from a pass before, as all passes of a step but the
first one do. All take turns; seconds are medians of forward and backward passes. MFU counts the decoder's work only, so
that what images cost lowers it. Goals: at most 10 % more seconds where groups share images, MFU within 5 %.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import Qwen3VLConfig

from benchmarks.gpu_models import COMMON, SHAPES, draw, flops, make_sequences, peak_flops
from benchmarks.reporting import report
from relaxd.config import GRPOConfig, TrainerConfig
from relaxd.data.towers import TowerOutputs
from services.trainer.batch.micro_batch import PackedMicroBatch, pack
from services.trainer.batch.sequence_media import DecodedItem, SequenceMedia
from services.trainer.learner import forward
from services.trainer.learner.learner import Learner
from services.trainer.model.policy_model import PolicyModel
from services.trainer.model.towers import KEPT_BYTES
from tests.kit.megatron_world import shut_down

TOKENS = 16384
SIDE = 1024
"""Pixels of an image's sides: 64 x 64 patches, 1,024 tokens."""
IMAGE_TOKEN = 151655
TOWER = "model.visual."
"""Beginning of the names of the tower's tensors."""
TEXT = 64
"""Tokens of a prompt behind its image."""
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "deepstack_visual_indexes": [5, 11, 17],
}
PROCESSOR = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}


def write_model(folder: Path) -> Qwen3VLConfig:
    """Write the configuration of Qwen3-VL 2B."""
    common = {name: value for name, value in COMMON.items() if name not in ("rope_theta", "tie_word_embeddings")}
    text = {**SHAPES["1.7b"], **common, "num_key_value_heads": 8, "rope_parameters": ROPE}
    config = Qwen3VLConfig(text_config=text, vision_config=VISION, image_token_id=IMAGE_TOKEN, tie_word_embeddings=True)
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return config


def make_batch(learner: Learner, vocabulary: int, groups: int, with_media: bool) -> PackedMicroBatch:
    """Pack 8 sequences of `groups` groups, whose prompts begin with an image or with as much text."""
    vision = learner._forward.vision
    assert vision is not None
    grid = (1, SIDE // 16, SIDE // 16)
    size = vision.tokens.count(grid)
    each, sequences = 8 // groups, []
    for group in range(groups):
        rng = np.random.default_rng(group)
        prompt = rng.integers(0, IMAGE_TOKEN, size + TEXT)
        prompt[:size] = IMAGE_TOKEN if with_media else prompt[:size]
        images = None
        if with_media:
            pixels = rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
            images = SequenceMedia.of(prompt, [DecodedItem(f"{group}", grid, pixels)], vision.tokens)
        own = (TOKENS - groups * len(prompt)) // 8 if each > 1 else TOKENS // 8 - len(prompt)
        for one in make_sequences(vocabulary, each * own + len(prompt), each, group, len(prompt)):
            tokens = np.concatenate([prompt, one.tokens[len(prompt) :]])
            sequences.append(replace(one, tokens=tokens, media=images))
    return pack(sequences)


def main() -> None:
    """Measure all cases in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    settings = {"dtype": "bfloat16", "micro_batch_tokens": TOKENS}
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(forward, "load_hf", draw):
        config = write_model(Path(folder))
        learner = Learner(Path(folder), TrainerConfig.model_validate(settings), GRPOConfig(), steps=1000)
        cases = {
            (groups, kind): make_batch(learner, IMAGE_TOKEN, groups, kind != "text")
            for groups in (8, 2)
            for kind in ("text", "images", "kept")
        }
        model = learner._policy
        assert isinstance(model, PolicyModel)
    seconds: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
    for _ in range(options.rounds + 1):
        for case, batch in cases.items():
            if case[1] == "images":
                model.tower_outputs = TowerOutputs(KEPT_BYTES, on_host=True)
            torch.cuda.synchronize()
            began = time.perf_counter()
            learner.accumulate([batch])
            torch.cuda.synchronize()
            seconds[case].append(time.perf_counter() - began)
            learner.discard()
    decoder = sum(math.prod(spec.shape) for spec in learner.hf_tensor_specs() if not spec.name.startswith(TOWER))
    rows = []
    for (groups, kind), found in seconds.items():
        median = statistics.median(found[1:])
        work = flops(config.text_config, decoder, cases[groups, "text"])
        rows.append(
            {
                "prompts": f"{groups} of {8 // groups} sequences",
                "tokens": len(cases[groups, kind].tokens),
                "case": kind,
                "forward_backward_seconds": median,
                "mfu": work / median / peak_flops(),
                "ratio": median / statistics.median(seconds[groups, "text"][1:]),
            }
        )
    report("gpu-images", rows, gpu=torch.cuda.get_device_name(), torch=torch.__version__, rounds=options.rounds)
    shut_down()


if __name__ == "__main__":
    main()
