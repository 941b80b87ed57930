"""Weight groups over NCCL: what arrives, how fast, and what the death of a member costs the others."""

import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from tests.gpu.weight_members import ELEMENTS, Member, broadcast, connect


@pytest.fixture
def members() -> Iterator[list[Member]]:
    members = [Member(device) for device in range(2)]
    yield members
    for member in members:
        member.process.kill()
        member.process.wait()


@pytest.mark.gpu(2)
def test_a_member_that_is_killed_costs_the_others_neither_process_nor_gpu(
    members: list[Member], facts: Callable[[str, object], None]
) -> None:
    """One story, because starting CUDA in processes is most of its cost."""
    names = (f"group-{number}" for number in count())
    members[0].tell(do="host")
    port = members[0].answer()["port"]
    first = connect(members, port, next(names))
    broadcast(members, source=0, value=3.0)
    broadcast(members, source=1, value=-4.0)
    seconds = broadcast(members, source=0, value=5.0, repeat=20)
    pace = 20 * 2 * sum(ELEMENTS) / seconds / 1e9
    facts("connect_seconds", first)
    facts("gigabytes_per_second", pace)
    assert pace > 50
    members[1].tell(do="works")
    members[1].answer()

    # The peer dies before it takes part: the other one's GPU waits for it for ever.
    members[1].process.kill()
    members[0].tell(do="broadcast", elements=ELEMENTS, source=0, value=1.0, timeout=2.0, repeat=3)
    late = members[0].answer()
    assert "did not end within 2 s" in late["error"], late
    assert late["took"] < 6
    members[0].tell(do="works")
    assert members[0].answer()["sum"] == 1 << 20

    # The same process meets another one in a new group.
    members[1] = Member(1)
    connect(members, port, next(names))
    broadcast(members, source=0, value=7.0)

    # It dies while both are in the middle of broadcasts, and the other one is told so.
    for member in members:
        member.tell(
            do="broadcast", elements=ELEMENTS, source=0, value=1.0, timeout=60, repeat=3000,
            abort_after=3.0 if member is members[0] else None,
        )  # fmt: skip
    time.sleep(1.0)  # into the middle: 3000 times 387 MB take some seconds
    members[1].process.kill()
    aborted = members[0].answer()
    assert "was aborted" in aborted["error"] or "failed" in aborted["error"], aborted
    assert aborted["took"] < 10
    members[0].tell(do="works")
    assert members[0].answer()["sum"] == 1 << 20

    # One that nobody answers can be told to stop connecting.
    members[0].tell(
        do="connect", store_port=port, name=next(names), rank=0, world_size=2, timeout=60, abort_after=0.3
    )  # fmt: skip
    assert "aborted while it was being connected" in members[0].answer()["error"]

    members[1] = Member(1)
    connect(members, port, next(names))
    broadcast(members, source=0, value=9.0)

    # And a new group of the same processes, as after a change of members.
    warm = connect(members, port, next(names))
    broadcast(members, source=1, value=2.0)
    facts("connect_again_seconds", warm)
    assert warm < 2.0
