"""Statistics of a step's samples: rewards, lengths and repetition, also by outcome, finish reason and source.

Everything is numpy over one value per sample, except the compression that finds repetition.
"""

import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.board.group_contents import RIGHT_FROM
from relaxd.finish_reasons import TRUNCATED
from services.trainer.batch.groups import TrainGroup

STATISTICS: dict[str, Callable[[NDArray[Any]], Any]] = {
    "mean": np.mean,
    "median": np.median,
    "min": np.min,
    "max": np.max,
    "std": np.std,
}
"""Statistics of reward and response_length, by the end of their names."""
REPEATED_CHARACTERS = 10_000
"""Characters at an answer's end that are compressed."""
REPEATED_RATIO = 10.0
"""Compression ratio of an answer's end above which the answer repeats itself."""
MAX_COMPRESSED = 512
"""Maximum number of a step's answers to compress, evenly spread: each takes 0.2 ms."""
MAX_SOURCES = 32
"""Maximum number of sources with statistics; the samples of all further sources are counted as `other`."""
NO_NAME = re.compile(r"[^A-Za-z0-9_.\-]+")
"""Characters of a source that can't be in a metric's name."""
MAX_NAME = 64
"""Maximum length of a source in a metric's name."""


@dataclass(frozen=True)
class StepSamples:
    """Facts of a step's samples, each an array [n]."""

    rewards: NDArray[np.float64]
    lengths: NDArray[np.int32]
    """Response tokens."""
    finishes: NDArray[np.str_]
    """Finish reason of the last sequence."""
    texts: NDArray[np.object_]
    """Text of the last sequence."""
    sources: NDArray[np.str_]
    """`metadata.data_source` of the prompt in the form for metric names; "" if there is none."""

    @classmethod
    def of(cls, groups: Sequence[TrainGroup]) -> "StepSamples":
        """Return the samples of groups, at least one."""
        finishes: list[str] = []
        texts: list[str] = []
        sources: list[str] = []
        for group in groups:
            columns = group.columns
            last = np.searchsorted(columns["sample_of_sequence"], np.arange(group.samples), side="right") - 1
            finishes += [str(columns["finish"][place]) for place in last]
            texts += [str(columns["text"][place]) for place in last]
            sources += [_source(columns["prompt"])] * group.samples
        return cls(
            rewards=np.concatenate([group.columns["reward"] for group in groups]),
            lengths=np.concatenate([group.sample_lengths for group in groups]),
            finishes=np.array(finishes),
            texts=np.array(texts, dtype=np.object_),
            sources=np.array(sources),
        )

    def part(self, chosen: NDArray[np.bool_]) -> "StepSamples":
        """Return the samples for which `chosen` [n] is true."""
        return StepSamples(**{name: values[chosen] for name, values in vars(self).items()})


MEASURES: dict[str, Callable[[StepSamples], Any]] = {
    "reward_mean": lambda samples: samples.rewards.mean(),
    "response_length_mean": lambda samples: samples.lengths.mean(),
    "right_share": lambda samples: (samples.rewards >= RIGHT_FROM).mean(),
    "truncated_share": lambda samples: np.isin(samples.finishes, [*TRUNCATED]).mean(),
}
"""Measures of some of a step's samples, by the end of their names."""
PARTS: dict[str, tuple[Callable[[StepSamples], dict[str, NDArray[np.bool_]]], tuple[str, ...]]] = {
    "outcome": (
        lambda samples: {"right": samples.rewards >= RIGHT_FROM, "wrong": samples.rewards < RIGHT_FROM},
        ("response_length_mean", "truncated_share"),
    ),
    "finish": (
        lambda samples: {reason: samples.finishes == reason for reason in np.unique(samples.finishes)},
        ("reward_mean", "response_length_mean"),
    ),
    "source": (lambda samples: _by_source(samples.sources), tuple(MEASURES)),
}
"""Divisions of a step's samples, and the measures of each part, as `<division>/<part>/<measure>`."""


def sample_statistics(groups: Sequence[TrainGroup]) -> dict[str, float]:
    """Return the statistics of the samples of a step's groups, at least one, by the names of docs/metrics.md."""
    samples = StepSamples.of(groups)
    found: dict[str, Any] = {}
    for name, values in (("reward", samples.rewards), ("response_length", samples.lengths)):
        found |= {f"{name}_{statistic}": compute(values) for statistic, compute in STATISTICS.items()}
    found |= {name: MEASURES[name](samples) for name in ("right_share", "truncated_share")}
    compressed = np.unique(np.linspace(0, len(samples.texts) - 1, MAX_COMPRESSED).astype(int))
    found["repetition_share"] = np.mean([repeats(text) for text in samples.texts[compressed]])
    for division, (divide, measures) in PARTS.items():
        for part, chosen in divide(samples).items():
            found[f"{division}/{part}/share"] = chosen.mean()
            if chosen.any():
                some = samples.part(chosen)
                found |= {f"{division}/{part}/{name}": MEASURES[name](some) for name in measures}
    return {name: float(value) for name, value in found.items()}


def repeats(text: str) -> bool:
    """Return True if the last 10,000 characters of a text compress more than ten times."""
    end = text[-REPEATED_CHARACTERS:].encode(errors="replace")
    return len(end) > REPEATED_RATIO * len(zlib.compress(end, 1))


def _source(prompt: Any) -> str:
    metadata = prompt.get("metadata") if isinstance(prompt, Mapping) else None
    source = metadata.get("data_source") if isinstance(metadata, Mapping) else None
    return "" if source is None else NO_NAME.sub("_", str(source))[:MAX_NAME]


def _by_source(sources: NDArray[np.str_]) -> dict[str, NDArray[np.bool_]]:
    """Return the samples of each source: of the most frequent ones, and of all others together."""
    counts = Counter(source for source in sources.tolist() if source)
    parts = {source: sources == source for source, _ in counts.most_common(MAX_SOURCES)}
    if len(counts) > MAX_SOURCES:
        parts["other"] = (sources != "") & ~np.isin(sources, list(parts))
    return parts
