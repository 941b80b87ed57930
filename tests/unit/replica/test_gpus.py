"""What CUDA_VISIBLE_DEVICES means for leases, and what children are told."""

import pytest

from relaxd.replica.gpus import (
    SHARE_VARIABLE,
    Gpu,
    gpu_environment,
    gpu_gauges,
    select_visible,
    visible_gpus,
    wait_until_steady,
)
from tests.kit.cases import each

WHOLE = tuple(Gpu(f"GPU-{letter}0000000-0000-0000-0000-000000000000", index) for index, letter in enumerate("abcd"))
PARTS = (Gpu("MIG-1", 4), Gpu("MIG-2", 4))
A, B, C, D = WHOLE


@each(
    ("selection", "expected"),
    [
        (None, (*WHOLE, *PARTS)),
        ("", ()),
        ("-1", ()),
        ("0,1,2,3", WHOLE),
        ("2, 0", (C, A)),
        ("1,9,0", (B,)),  # CUDA ends the list at what there isn't
        ("0,-1,1", (A,)),
        ("1,1", (B,)),
        (D.uuid, (D,)),
        ("GPU-c,GPU-a", (C, A)),
        ("GPU-", ()),  # which one?
        ("GPU-x,0", ()),
        ("MIG-2", (PARTS[1],)),
        ("4", PARTS),
    ],
)
def test_the_visible_ones(selection: str | None, expected: tuple[Gpu, ...]) -> None:
    assert select_visible((*WHOLE, *PARTS), selection) == expected


def test_children_see_what_was_leased_and_nothing_else() -> None:
    assert gpu_environment((D, B)) == {"CUDA_VISIBLE_DEVICES": "3,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpu_environment((D,), 0.3)[SHARE_VARIABLE] == "0.3"
    assert gpu_environment(PARTS[:1])["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    assert gpu_environment(())["CUDA_VISIBLE_DEVICES"] == ""


async def test_an_engine_over_several_gpus_waits_until_others_have_given_their_memory_back() -> None:
    gib = 1 << 30
    seen = [(60 * gib, 60 * gib), (2 * gib, 60 * gib), (2 * gib, 2 * gib), *[(2 * gib, 2 * gib + 1000)] * 400]
    slept: list[float] = []
    told: list[str] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    await wait_until_steady(lambda: seen[len(slept)], told.append, sleep=sleep)
    assert sum(slept) == pytest.approx(1.4)  # two changes, then a second without any
    assert [text.split("GPU ")[1][0] for text in told] == ["0", "1"]
    await wait_until_steady(lambda: (), told.append, sleep=sleep)  # NVML tells nothing
    slept.clear()
    await wait_until_steady(lambda: (len(slept) * gib, 0), told.append, sleep=sleep)
    assert sum(slept) == pytest.approx(60)


def test_an_empty_list_hides_the_gpus_that_there_are() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert gpu_gauges(()) == {}
