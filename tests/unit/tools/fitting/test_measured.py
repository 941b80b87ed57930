"""`relaxd fit`'s arithmetic against what was measured on H200s and H100s (docs/benchmarks.md, "Training on GPUs")."""

from pathlib import Path

import pytest

from relaxd.models.flops import vision_flops
from relaxd.models.layouts import Layout, model_parameters
from relaxd.models.shape import VisionShape, read_shape
from relaxd.tools.fitting.activations import MicroBatch
from relaxd.tools.fitting.gpu_memory import ENGINE_PROCESS_BYTES, engine_memory
from relaxd.tools.fitting.speed import StepWork, predict
from relaxd.tools.fitting.trainer_memory import USABLE_SHARE, TrainedModelShape, trainer_stage
from tests.unit.tools.fitting.models import write_config

H200, H100 = int(139.8 * (1 << 30)), int(79.1 * (1 << 30))
"""What torch says that they have."""
DP2, CP2, TP2, PP2 = Layout(2), Layout(2, context=2), Layout(2, tensor=2), Layout(2, pipeline=2)
PEAKS = [
    ("1.7b", 8_192, Layout(1), 51),
    ("1.7b", 16_384, Layout(1), 70),
    ("1.7b", 16_384, DP2, 60),
    ("1.7b", 16_384, CP2, 41),
    ("1.7b", 16_384, TP2, 35),
    ("1.7b", 16_384, PP2, 53),
    ("1.7b", 16_384, Layout(4), 55),
    ("1.7b", 16_384, Layout(4, context=2), 36),
    ("1.7b", 16_384, Layout(4, tensor=2), 30),
    ("1.7b", 16_384, Layout(4, pipeline=2), 47),
    ("1.7b", 16_384, Layout(4, tensor=2, pipeline=2), 27),
    ("1.7b", 16_384, Layout(4, tensor=4), 18),
    ("1.7b", 16_384, Layout(1, offload=True), 49),
    ("mixture", 16_384, Layout(1), 85),
    ("4b", 32_768, Layout(1, recompute="full"), 86),
    ("4b", 32_768, Layout(1, recompute="selective"), 117),
    ("4b", 16_384, Layout(1, recompute="selective", recompute_layers=18), 120),
    ("4b", 16_384, Layout(1, recompute="selective"), 96),
]
"""Model, tokens of a micro-batch, layout, GB of tensors at the peak."""
H100_PEAKS = [
    (8_192, 8_192, Layout(1), 8, 50.56),
    (8_192, 8_192, Layout(1), 4, 43.68),
    (8_192, 8_192, Layout(1), 3 + 1 / 32, 42.01),
    (8_192, 8_192, DP2, 8, 40.24),
    (8_192, 8_192, Layout(2, shard_gradients=True), 8, 38.09),
    (8_192, 8_192, PP2, 8, 35.60),
    (8_192, 8_192, Layout(2, pipeline=2, pipeline_chunks=2), 8, 40.09),
    (8_192, 8_192, Layout(2, pipeline=2, pipeline_chunks=7), 8, 37.60),
    (8_704, 8_704, Layout(1), 8, 51.79),
    (12_288, 8 * 8_704, Layout(1), 8, 80.06),
    (32_768, 32_768, Layout(1, recompute="full"), 8, 39.27),
    (32_768, 32_768, Layout(1, recompute="full", activations_on_host=16 * 10**9), 8, 35.64),
]
"""Tokens of a micro-batch of the 1.7b model, tokens that attention sees, layout, bytes of a parameter's moments, GB."""
SECONDS = [
    (DP2, 1.396 + 0.037),
    (CP2, 1.612 + 0.036),
    (TP2, 1.752 + 0.022),
    (PP2, 1.762 + 0.022),
    (Layout(4), 0.703 + 0.036),
    (Layout(4, context=2), 0.806 + 0.035),
    (Layout(4, tensor=2), 0.883 + 0.021),
    (Layout(4, pipeline=2), 0.951 + 0.027),
    (Layout(4, tensor=2, pipeline=2), 1.101 + 0.015),
    (Layout(4, tensor=4), 1.159 + 0.018),
]
"""Layout, and seconds of 8 micro-batches of 16,384 tokens in sequences of 2,048, forward, backward and update."""


def peak(
    folder: Path, model: str, tokens: int, layout: Layout, *, slots: int = 0, moments: float = 8, gpu: int = H200
) -> int:
    shape = read_shape(write_config(folder / model, model))
    batch = MicroBatch(tokens, slots or tokens, fused=True, element=2)
    models = [TrainedModelShape("", shape, layout.offload, moments)]
    stages = (trainer_stage(models, [], layout, stage, batch, gpu) for stage in range(layout.pipeline))
    return max(sum(stage.values()) for stage in stages)


@pytest.mark.parametrize(("model", "tokens", "layout", "gigabytes"), PEAKS)
def test_peaks(tmp_path: Path, model: str, tokens: int, layout: Layout, gigabytes: int) -> None:
    """Within 3 %, to half a GB of rounding."""
    assert peak(tmp_path, model, tokens, layout) / 1e9 == pytest.approx(gigabytes, rel=0.03, abs=0.5)


@pytest.mark.parametrize(("tokens", "slots", "layout", "moments", "gigabytes"), H100_PEAKS)
def test_peaks_of_what_saves_memory(
    tmp_path: Path, tokens: int, slots: int, layout: Layout, moments: float, gigabytes: float
) -> None:
    found = peak(tmp_path, "1.7b", tokens, layout, slots=slots, moments=moments, gpu=H100) / 1e9
    assert found == pytest.approx(gigabytes, rel=0.03)


def test_what_ran_out_of_memory(tmp_path: Path) -> None:
    assert peak(tmp_path, "4b", 16_384, Layout(1)) > USABLE_SHARE * H200
    assert peak(tmp_path, "1.7b", 16_384, Layout(1), slots=8 * 9_216, gpu=H100) > USABLE_SHARE * H100


def test_bytes_of_a_token(tmp_path: Path) -> None:
    """Between 16,384 and 24,576 tokens: 2.34 MB each without recompute, 0.38 MB with."""
    for layout, megabytes in ((Layout(1), 2.34), (Layout(1, recompute="full"), 0.38)):
        grown = peak(tmp_path, "1.7b", 24_576, layout) - peak(tmp_path, "1.7b", 16_384, layout)
        assert grown / 8192 / 1e6 == pytest.approx(megabytes, rel=0.05)


@pytest.mark.parametrize(("layout", "measured"), SECONDS)
def test_seconds(tmp_path: Path, layout: Layout, measured: float) -> None:
    """The prediction's constants were fitted to these; the order of layouts is what it is for."""
    shape = read_shape(write_config(tmp_path, "1.7b"))
    tokens = 8 * 16_384
    # FULLNESS says how full micro-batches usually are; these were full.
    work = StepWork(tokens, attended=tokens * 2048 / 2, micro_batch_tokens=int(16_384 / 0.9))
    assert predict(shape, layout, work).total == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize(("images", "measured"), [(8, 0.649 - 0.314), (2, 0.425 - 0.368)])
def test_seconds_of_a_frozen_tower(tmp_path: Path, images: int, measured: float) -> None:
    """Of images of 1,024 tokens, Qwen3-VL 2B's (`benchmarks.gpu_images`): what they cost beside as much text."""
    shape = read_shape(write_config(tmp_path, "1.7b"))
    tower = VisionShape(
        layers=24, hidden=1024, ffn=4096, heads=16, patch_values=1536, positions=2304, merge=2, deepstack=3, output=2048
    )
    work = StepWork(16_384, 16_384 * 2048 / 2, 16_384, tower_flops=images * vision_flops(tower, 1024))
    assert predict(shape, Layout(1), work).towers == pytest.approx(measured, rel=0.25)
    assert predict(shape, Layout(2, tensor=2), work).towers == predict(shape, Layout(1), work).towers
    assert predict(shape, Layout(2), work).towers == predict(shape, Layout(1), work).towers / 2


@pytest.mark.parametrize(("parameters_b", "layers", "hidden", "awake"), [(0.135, 30, 576, 78.7), (0.6, 28, 1024, 81)])
def test_engines(tmp_path: Path, parameters_b: float, layers: int, hidden: int, awake: float) -> None:
    """Two engines with half of an H200 for weights and cache, by NVML (docs/benchmarks.md, "Changing turns")."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 16, "vocab_size": 49_152}
    shape = read_shape(write_config(tmp_path, "1.7b", **sizes, intermediate_size=3 * hidden, head_dim=64))
    assert model_parameters(shape) < 2 * parameters_b * 1e9  # it hardly matters: the cache takes what weights leave
    engine = engine_memory(shape, 1, 2, 0.5, H200)
    assert sum(engine.bytes.values()) / 1e9 == pytest.approx(awake, rel=0.03)
    assert engine.bytes["process"] == ENGINE_PROCESS_BYTES


@pytest.mark.parametrize(("awake", "model", "hidden", "layers"), [(11.2, "135M", 576, 30)])
def test_a_whole_process_holds_more(tmp_path: Path, awake: float, model: str, hidden: int, layers: int) -> None:
    """Beyond 10 %: NVML counted the process, with what torch keeps of freed memory, on micro-batches of unknown size.

    The arithmetic for the largest micro-batch that the run's settings allow is above what was in use.
    """
    sizes = {"hidden_size": hidden, "intermediate_size": 1536, "num_hidden_layers": layers, "num_attention_heads": 9}
    folder = tmp_path / model
    shape = read_shape(
        write_config(folder, "1.7b", **sizes, num_key_value_heads=3, head_dim=64, vocab_size=49_152, model_type="llama")
    )
    batch = MicroBatch(16_384, 16_384, fused=True, element=2)
    largest = sum(trainer_stage([TrainedModelShape("", shape, offload=False)], [], Layout(1), 0, batch, H200).values())
    assert awake < largest / 1e9 < 2 * awake
