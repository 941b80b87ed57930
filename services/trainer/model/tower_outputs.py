"""Outputs of towers by item. Those of frozen ones are kept, so that passes, updates and steps with the same item run
them once.

A frozen tower gets each item alone. So its output is bit for bit the same, whatever else is in a micro-batch and
whether the output is kept: a step that is repeated from its file by a restarted trainer has the same one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relaxd.media import AUDIO, IMAGE, VIDEO, Grid
from relaxd.media.cache import RecentItems

KEPT_BYTES = 1 << 31
"""Default maximum of cached outputs of a model's towers, in bytes of the host's memory."""


@dataclass(frozen=True)
class DeviceMedia:
    """The media of a micro-batch on one rank: I different items.

    M rows of the towers' output belong to tokens of this rank's slice.
    """

    hashes: tuple[str, ...]
    """The items, I."""
    towers: tuple[str, ...]
    """Tower of each item, by name."""
    inputs: Callable[[int], Tensor]
    """Returns the input of an item's tower, by the item's index: patches, float32 [patches, values], or a spectrogram,
    float32 [bands, frames]."""
    grids: Sequence[Grid]
    """Size of each item."""
    counts: Sequence[int]
    """Number of rows of each item."""
    rows: Tensor
    """int64 [M]: rows of the towers' output."""
    places: Tensor
    """int64 [M]: their tokens, by number in this rank's slice."""


class TowerOutputs:
    """Outputs of a model's frozen towers, cached in the host's memory."""

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        """Make it empty.

        Args:
            max_bytes: maximum size of the outputs that are kept, in bytes. 0: none is.
        """
        self._kept: RecentItems[list[Tensor]] = RecentItems(max_bytes)
        self._weights = -1
        self.runs = 0
        """Number of items that the towers have run for."""
        self.asked = 0
        """Number of items requested."""

    @torch.no_grad()
    def of(self, towers: torch.nn.ModuleDict, media: DeviceMedia, items: Sequence[int]) -> dict[int, list[Tensor]]:
        """Return the rows of items given by their indices, like `run_towers`."""
        # Loading and refreshing write into the parameters, which count that.
        weights = sum(parameter._version for parameter in towers.parameters())
        if weights != self._weights:
            self._kept.clear()
            self._weights = weights
        new: dict[int, list[Tensor]] = {}
        found: dict[int, list[Tensor]] = {}
        for item in items:
            if (kept := self._kept.get(media.hashes[item])) is None:
                found[item] = new[item] = run_towers(towers, media, [item])[item]
            else:
                found[item] = [rows.to(media.places.device) for rows in kept]
        self.runs += len(new)
        self.asked += len(items)
        # Behind all passes, because a copy to the host waits for the device.
        for item, outputs in found.items():
            name = media.hashes[item]
            stored = [rows.cpu() for rows in outputs] if item in new else self._kept.get(name)
            if stored is not None:
                self._kept.keep(name, stored, sum(rows.nbytes for rows in stored))
        return found


def run_towers(towers: torch.nn.ModuleDict, media: DeviceMedia, items: Sequence[int]) -> dict[int, list[Tensor]]:
    """Run the towers for some of the items.

    Returns:
        Rows by the index of the item, and those for DeepStack: [rows, hidden] each. The latter are zeros of a sound.
    """
    found: dict[int, list[Tensor]] = {}
    for name, run in _RUNS.items():
        if own := [item for item in items if media.towers[item] == name]:
            outputs = run(towers[name], [media.inputs(item) for item in own], [media.grids[item] for item in own])
            parts = zip(*(rows.split([media.counts[item] for item in own]) for rows in outputs), strict=True)
            found |= zip(own, map(list, parts), strict=True)
    layers = len(getattr(towers[VISUAL], "deepstack_merger_list", ()))
    return {item: rows + [torch.zeros_like(rows[0])] * (layers + 1 - len(rows)) for item, rows in found.items()}


def _see(tower: torch.nn.Module, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
    """Return the rows of images and videos, one after the other, and those for DeepStack."""
    seen = tower(torch.cat(list(patches)), torch.tensor(grids, device=patches[0].device), return_dict=True)
    return [seen.pooler_output, *getattr(seen, "deepstack_features", ())]


def _hear(tower: torch.nn.Module, spectrograms: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
    """Return the rows of sounds, one after the other.

    Each runs alone: beside a longer one the tower would hear a sound of less than a second otherwise.
    """
    dtype = next(tower.parameters()).dtype  # to which transformers 5.12 doesn't convert
    lengths = [torch.tensor(grid, device=one.device) for one, grid in zip(spectrograms, grids, strict=True)]
    heard = [
        tower(one.to(dtype), feature_lens=own, return_dict=True) for one, own in zip(spectrograms, lengths, strict=True)
    ]
    return [torch.cat([one.pooler_output for one in heard])]


VISUAL, AUDIO_TOWER = "visual", "audio_tower"
_RUNS: dict[str, Callable[[torch.nn.Module, Sequence[Tensor], Sequence[Grid]], list[Tensor]]] = {
    VISUAL: _see,
    AUDIO_TOWER: _hear,
}
"""The towers by name, which is that of Hugging Face's modules."""
TOWER_OF_KIND = {IMAGE: VISUAL, VIDEO: VISUAL, AUDIO: AUDIO_TOWER}
"""Name of the tower for each kind of media."""
