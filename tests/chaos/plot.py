"""Recovery by kind of fault, and memory over time, as pictures beside the results."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from tests.chaos.campaign import Outcome
from tests.chaos.memory import Sample


def plot_recovery(outcomes: Sequence[Outcome], path: Path) -> None:
    """A dot for each fault."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.recovery is not None:
            seconds[outcome.fault].append(outcome.recovery)
    names = sorted(seconds, key=lambda name: max(seconds[name]))
    figure, axes = plt.subplots(figsize=(8, 1 + 0.16 * len(names)), layout="constrained")
    for height, name in enumerate(names):
        axes.plot(seconds[name], [height] * len(seconds[name]), "o", color="tab:blue", markersize=3, alpha=0.7)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set_xscale("log")
    axes.set_xlabel("seconds until the first step is committed that began after the fault")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_memory(samples: Mapping[str, Sequence[Sample]], path: Path) -> None:
    """A line for each process."""
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    begun = min(found[0].time for found in samples.values())
    for name, found in sorted(samples.items()):
        lives: dict[tuple[int, float], list[Sample]] = defaultdict(list)
        for sample in found:
            lives[sample.life].append(sample)
        color = axes.plot([], [], label=name)[0].get_color()
        for life in lives.values():
            axes.plot([(s.time - begun) / 60 for s in life], [s.megabytes for s in life], color=color, linewidth=0.8)
    axes.set_xlabel("minutes")
    axes.set_ylabel("MB")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110)
    plt.close(figure)
