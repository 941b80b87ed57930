"""FLOPs of towers beside those that torch counts in transformers' modules, and beside a count by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from relaxd.models.flops import audio_flops, vision_flops
from relaxd.models.shape import AudioShape, VisionShape

SHARED = {"layers": 3, "hidden": 32, "ffn": 80, "output": 48}


def test_a_vision_tower() -> None:
    """Of an image, and of a video, whose times are images; without the interpolation of positions, of 4 a patch."""
    shape = VisionShape(**SHARED, heads=4, patch_values=1536, positions=64, merge=2, deepstack=2)
    config = Qwen3VLVisionConfig(
        depth=3,
        hidden_size=32,
        intermediate_size=80,
        out_hidden_size=48,
        num_heads=4,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1],
    )
    tower = Qwen3VLVisionModel._from_config(config, attn_implementation="eager")
    for times, rows, columns in ((1, 6, 8), (3, 8, 4)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tower(torch.zeros(times * rows * columns, 1536), torch.tensor([[times, rows, columns]]))
        expected = times * vision_flops(shape, rows * columns / 4)
        assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


def test_an_audio_tower() -> None:
    """Of whole windows of 8 seconds. A part of one is less."""
    shape = AudioShape(**SHARED, bands=20, channels=6)
    config = Qwen3OmniMoeAudioEncoderConfig(
        encoder_layers=3,
        d_model=32,
        encoder_ffn_dim=80,
        output_dim=48,
        encoder_attention_heads=4,
        num_mel_bins=20,
        downsample_hidden_size=6,
    )
    tower = Qwen3OmniMoeAudioEncoder._from_config(config, attn_implementation="eager")
    counts = {}
    for frames in (800, 1600, 300):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            rows = tower(torch.zeros(20, frames), feature_lens=torch.tensor([frames])).last_hidden_state
        assert len(rows) == frames * 13 // 100
        counts[frames] = counter.get_total_flops() / audio_flops(shape, len(rows))
    assert counts[800] == counts[1600] == pytest.approx(1, rel=1e-9)
    assert 0.7 < counts[300] < 1


def test_qwen3_vl_2b_by_hand() -> None:
    """An image of 1,024 x 1,024 pixels: 64 x 64 patches of 2 x 16 x 16 pixels, 1,024 tokens."""
    shape = VisionShape(
        layers=24, hidden=1024, ffn=4096, heads=16, patch_values=1536, positions=2304, merge=2, deepstack=3, output=2048
    )
    patches = 2 * 4096 * 1536 * 1024
    attention = 4096 * (4 * 2 * 1024 * 1024) + 2 * 2 * 4096 * 4096 * 1024
    mlp = 4096 * (2 * 2 * 1024 * 4096)
    merger = 1024 * (2 * 4096 * 4096 + 2 * 4096 * 2048)
    assert (
        vision_flops(shape, 1024) == patches + 24 * (attention + mlp) + 4 * merger == pytest.approx(4.34e12, rel=1e-3)
    )
