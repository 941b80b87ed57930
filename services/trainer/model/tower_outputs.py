"""Outputs of a frozen vision tower by image, so that passes, updates and steps with the same image run it once.

The tower sees each image alone. So its output is bit for bit the same, whatever else is in a micro-batch and whether
the output is kept: a step that is repeated from its file by a restarted trainer has the same one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from relaxd.media.cache import RecentItems
from services.trainer.model.device_images import DeviceImages

KEPT_BYTES = 1 << 31
"""Default maximum size of the outputs that are kept of a tower, in bytes of the host's memory."""


class TowerOutputs:
    """The outputs of one frozen tower, kept in the host's memory."""

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        """Make it empty.

        Args:
            max_bytes: maximum size of the outputs that are kept, in bytes. 0: none is.
        """
        self._kept: RecentItems[list[Tensor]] = RecentItems(max_bytes)
        self._weights = -1
        self.runs = 0
        """Number of images that the tower has seen."""
        self.asked = 0
        """Number of images requested."""

    @torch.no_grad()
    def of(self, tower: torch.nn.Module, images: DeviceImages) -> list[Tensor]:
        """Return the tower's rows of the images, one after the other, and those for DeepStack: [rows, hidden] each."""
        # Loading and refreshing write into the parameters, which count that.
        weights = sum(parameter._version for parameter in tower.parameters())
        if weights != self._weights:
            self._kept.clear()
            self._weights = weights
        new: dict[str, list[Tensor]] = {}
        found: dict[str, list[Tensor]] = {}
        for index, name in enumerate(images.hashes):
            if (kept := self._kept.get(name)) is None:
                found[name] = new[name] = run_tower(tower, images, [index])
            else:
                found[name] = [rows.to(images.places.device) for rows in kept]
        self.runs += len(new)
        self.asked += len(images.hashes)
        # Behind all passes, because a copy to the host waits for the device.
        for name, outputs in found.items():
            stored = [rows.cpu() for rows in outputs] if name in new else self._kept.get(name)
            if stored is not None:
                self._kept.keep(name, stored, sum(rows.nbytes for rows in stored))
        return [torch.cat(rows) for rows in zip(*(found[name] for name in images.hashes), strict=True)]


def run_tower(tower: torch.nn.Module, images: DeviceImages, indices: Sequence[int]) -> list[Tensor]:
    """Run the tower for some of the images. Returns its rows, and those for DeepStack: [rows, hidden] each."""
    seen = tower(images.patches(indices), images.grids[list(indices)], return_dict=True)
    return [seen.pooler_output, *seen.deepstack_features]
