"""Memory of SGLang engines that share a GPU, by SGLang's own arithmetic, on a GPU that is only counted."""

from collections.abc import Callable, Iterator

import pytest
import torch

from relaxd.rpc.errors import InvalidArgument
from services.rollout.engines.sglang import gpu_share
from services.rollout.engines.sglang.gpu_share import fraction_of_share, show_share

GIB = 1 << 30
TOTAL = 80 * GIB
CONTEXT = GIB // 2
"""Bytes of a process that torch doesn't count."""


class Gpu:
    """A GPU and the process that measures it now, in the place of torch's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reserved: dict[str, int] = {}
        self.now = ""
        self._patch = patch

    def enter(self, process: str, share: float) -> None:
        """Go on as this process, which has just started."""
        self.now, self.reserved[process] = process, 0
        self._patch.setattr(gpu_share, "memory_of_all", self._of_all)
        self._patch.setattr(torch.cuda, "mem_get_info", self._of_all)  # is put back in the end
        self._patch.setattr(torch.cuda, "memory_reserved", lambda device=None: self.reserved[self.now])
        show_share(share)

    def _of_all(self, device: object = None) -> tuple[int, int]:
        return TOTAL - sum(self.reserved.values()) - CONTEXT * len(self.reserved), TOTAL

    def start(self, process: str, share: float, weights: int, fraction: float, other: Callable[[], object]) -> int:
        """Start an engine as SGLang does; `other` happens while it loads. Returns the bytes of its cache."""
        self.enter(process, share)
        before = torch.cuda.mem_get_info(0)[0]
        self.reserved[process] += weights
        other()
        cache = int(torch.cuda.mem_get_info(0)[0] - before * (1 - fraction))
        self.reserved[process] += cache
        return cache


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with pytest.MonkeyPatch.context() as patch:
        yield Gpu(patch)


def test_weights_and_cache_are_the_same_whoever_starts_first_and_whatever_the_other_does(gpu: Gpu) -> None:
    cache = int(0.6 * 0.7 * TOTAL) - 9 * GIB
    assert gpu.start("engine", 0.7, 9 * GIB, 0.6, lambda: None) == pytest.approx(cache, abs=2)
    judge = int(0.8 * 0.3 * TOTAL) - 3 * GIB
    assert gpu.start("judge", 0.3, 3 * GIB, 0.8, lambda: None) == pytest.approx(judge, abs=2)
    del gpu.reserved["engine"]  # it died, and starts beside the judge, which dies meanwhile
    again = gpu.start("engine", 0.7, 9 * GIB, 0.6, lambda: gpu.reserved.pop("judge"))
    assert again == pytest.approx(cache, abs=2)


def test_a_whole_gpu_is_measured_as_it_is(gpu: Gpu) -> None:
    measured = torch.cuda.mem_get_info
    show_share(1.0)
    assert torch.cuda.mem_get_info is measured


def test_a_share_keeps_as_many_bytes_free_as_a_whole_gpu() -> None:
    for share in (0.2, 0.5, 0.9):
        kept = (1 - fraction_of_share(0.87, share)) * share
        assert kept == pytest.approx(0.13)
    with pytest.raises(InvalidArgument, match=r"keeps 0.13 of the GPU .* only 0.1 of it \(roles.judge.gpu_share\)"):
        fraction_of_share(0.87, 0.1)
