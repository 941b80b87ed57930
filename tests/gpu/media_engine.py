"""An SGLang engine in bfloat16 for tiny models that take media, and what tests of its log-probs have in common."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.engine import default_options
from relaxd.config import RolloutConfig
from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.sglang.syncs import sync
from tests.kit.engines import EngineRunner

MEAN, LARGEST = 0.05, 0.2
"""Tolerances of log-probs: bfloat16 alone gives 0.013 and 0.041 in transformers itself, another picture 0.55."""
TOKENS = 24
"""Length of an answer."""
BUCKET_BYTES = 1 << 22
"""Size of a source's buckets of weights."""


@contextmanager
def media_engine(model: Path, source: Source) -> Iterator[EngineRunner]:
    """An engine that has the first version of a source's weights."""
    options = default_options(16) | {"load_format": "auto", "max_total_tokens": 32768, "mm_attention_backend": "sdpa"}
    config = RolloutConfig(
        engine="sglang", dtype="bfloat16", max_running_samples=16, memory_fraction=0.2, sglang=options
    )
    runner = EngineRunner()
    try:
        runner.start(model, config, timeout=400)
        sync(runner, source, 1)
        yield runner
    finally:
        runner.close()
