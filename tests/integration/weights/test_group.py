"""Weight groups between real processes."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.namespaces import Node, namespaces
from tests.kit.processes import Partner, kill

PROMPT = 30.0
"""Seconds of a busy machine for what happens at once: half of what it would take if nobody noticed it."""


class Member(Partner):
    """One process of a group."""

    def __init__(self, *words: str, within: Node | None = None) -> None:
        super().__init__("-m", "tests.integration.weights.member", *words, within=within)


@pytest.fixture
def members(request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    """Three members, of the transport that the test names."""
    members = [Member(*([request.param] if hasattr(request, "param") else [])) for _ in range(3)]
    yield members
    kill(*(member.process for member in members))


def connect(members: list[Member], port: int, name: str, timeout: float = 60, **place: str) -> list[dict[str, Any]]:
    own = {"store_port": port, "name": name, "world_size": len(members), "timeout": timeout, **place}
    for rank, member in enumerate(members):
        member.tell(do="connect", rank=rank, **own)
    return [member.answer() for member in members]


def host(member: Member, **place: str) -> int:
    member.tell(do="host", **place)
    return int(member.answer()["port"])


def broadcast(members: list[Member], source: int, value: float, elements: int = 1000) -> list[dict[str, Any]]:
    for rank, member in enumerate(members):
        own = value if rank == source else 0
        member.tell(do="broadcast", source=source, value=own, elements=elements, timeout=60)
    return [member.answer() for member in members]


def test_a_group_outlives_the_death_and_the_abort_of_others(members: list[Member]) -> None:
    """One story, because starting torch three times is most of its cost."""
    port = host(members[0])
    assert not any("error" in answer for answer in connect(members, port, "first"))
    for source, value in ((0, 7.5), (1, -2.0)):
        for answer in broadcast(members, source, value):
            assert answer["values"] == [value] * 3

    # The last member dies in the middle of a broadcast: it never joins in, the others are in it.
    for member in members[:2]:
        member.tell(do="broadcast", source=0, value=1, elements=50_000_000, timeout=60)
    members[2].process.kill()
    failed = members[0].answer()
    assert "first failed" in failed["error"]
    assert failed["seconds"] < PROMPT
    assert members[1].answer()["seconds"] < PROMPT  # fails too, unless it got its copy before the source noticed

    # A group of the rest works, in the same processes and with the same store.
    rest = members[:2]
    assert not any("error" in answer for answer in connect(rest, port, "second"))
    assert [answer["values"][2] for answer in broadcast(rest, 0, 3.0, 1_000_000)] == [3.0, 3.0]

    # A member that waits for a broadcast that never comes leaves when told, long before its deadline.
    rest[1].tell(do="broadcast", source=0, elements=1000, timeout=60, abort_after=0.3)
    aborted = rest[1].answer()
    assert "was aborted" in aborted["error"]
    assert aborted["seconds"] < PROMPT

    # And at its deadline when nobody tells it.
    assert not any("error" in answer for answer in connect(rest, port, "third"))
    rest[1].tell(do="broadcast", source=0, elements=1000, timeout=0.5)
    late = rest[1].answer()
    assert "0.5 s" in late["error"] or "500ms" in late["error"]
    assert late["seconds"] < PROMPT

    # Members that don't come are named; a connecting member can be told to stop as well.
    rest[1].tell(do="connect", store_port=port, name="fourth", rank=1, world_size=2, timeout=0.5)
    assert "ranks [0] of 2 did not join within 0.5 s" in rest[1].answer()["error"]
    rest[1].tell(do="connect", store_port=port, name="fifth", rank=1, world_size=2, timeout=60, abort_after=0.2)
    stopped = rest[1].answer()
    assert "aborted while it was being connected" in stopped["error"]
    assert stopped["seconds"] < PROMPT

    # A name is used once: its keys would let half a group through.
    rest[0].tell(do="connect", store_port=port, name="third", rank=0, world_size=2, timeout=1)
    assert "is taken" in rest[0].answer()["error"]

    assert not any("error" in answer for answer in connect(rest, port, "sixth"))
    assert [answer["values"][0] for answer in broadcast(rest, 0, 9.0)] == [9.0, 9.0]


@pytest.mark.night
@pytest.mark.parametrize("members", ["gloo_chain"], indirect=True)
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_chain_ends_for_all_when_a_member_dies(members: list[Member], lost: int) -> None:
    port = host(members[2] if lost != 2 else members[0])
    assert not any("error" in answer for answer in connect(members, port, "first"))
    for source in range(3):
        assert [answer["values"] for answer in broadcast(members, source, 7.5, 3_000_000)] == [[7.5] * 3] * 3
    rest = [member for rank, member in enumerate(members) if rank != lost]
    for member in rest:
        member.tell(do="broadcast", source=0, value=1, elements=50_000_000, timeout=60)
    members[lost].process.kill()
    answers = [member.answer() for member in rest]
    assert all(answer["seconds"] < PROMPT for answer in answers), answers
    # Those before the lost one may have passed everything on, except for its neighbours.
    failed = ["error" in answer for answer in answers]
    assert failed == {0: [True, True], 1: [True, True], 2: [failed[0], True]}[lost], answers
    assert not any("error" in answer for answer in connect(rest, port, "second"))
    assert [answer["values"][2] for answer in broadcast(rest, 0, 3.0, 1_000_000)] == [3.0, 3.0]


@pytest.mark.night
@pytest.mark.parametrize("transport", ["gloo", "gloo_chain"])
def test_every_port_is_of_the_system_s_range(transport: str) -> None:
    """All that listens takes ports of the range that a container's sysctl sets."""
    with namespaces(2) as nodes:
        for node in nodes:
            words = node.command(["sysctl", "-qw", "net.ipv4.ip_local_port_range=20000 20099"])
            subprocess.run(words, check=True, timeout=60)
        members = [Member(transport, within=node) for node in nodes]
        try:
            place = nodes[0].address
            port = host(members[0], host=place)
            assert not any("error" in answer for answer in connect(members, port, "first", store_host=place))
            assert [answer["values"][0] for answer in broadcast(members, 0, 2.0)] == [2.0, 2.0]
            for member in members:
                ports = listened_in_namespace_of(member.process.pid)
                assert ports
                assert all(20000 <= port < 20100 for port in ports), ports
        finally:
            kill(*(member.process for member in members))


def listened_in_namespace_of(pid: int) -> list[int]:
    """Return the TCP ports on which a process's network namespace listens, as proc_net_tcp(5) has them."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return [int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == "0A"]


def test_a_store_that_is_not_there_is_named(members: list[Member]) -> None:
    members[0].tell(do="connect", store_port=9, name="x", rank=0, world_size=2, timeout=1)
    answer = members[0].answer()
    assert "store 127.0.0.1:9" in answer["error"]
    assert answer["seconds"] < PROMPT


def test_memory_that_all_see() -> None:
    """The flow of cuda_ipc, with pages of the host's memory in the place of a GPU's."""
    members = [Member("cuda_ipc") for _ in range(3)]
    try:
        port = host(members[0])
        assert not any("error" in answer for answer in connect(members, port, "first"))
        # More than there are slots, from two sources, and later ones larger: slots are used again and replaced.
        for number, elements in enumerate((1000, 1000, 10, 500_000, 500_000, 1_000_000, 7)):
            for source in (0, 1):
                value = number + source / 4
                for answer in broadcast(members, source, value, elements):
                    assert answer.get("values") == [value] * 3, answer

        # Nobody else comes to this one: it ends at its deadline, and so does the group, for everybody.
        members[2].tell(do="broadcast", source=0, elements=10, timeout=0.5)
        late = members[2].answer()["error"]
        assert "0.5 s" in late or "in time" in late
        members[1].tell(do="broadcast", source=0, elements=10, timeout=60)
        gone = members[1].answer()
        assert "aborted" in gone["error"] or "not connected" in gone["error"]
        assert gone["seconds"] < PROMPT

        # The source dies; who waits for it leaves when told.
        assert not any("error" in answer for answer in connect(members[:2], port, "second"))
        members[1].tell(do="broadcast", source=0, elements=10, timeout=60, abort_after=0.3)
        aborted = members[1].answer()
        assert "aborted" in aborted["error"]
        assert aborted["seconds"] < PROMPT

        # The other one's memory is replaced only when it has been read.
        assert not any("error" in answer for answer in connect(members, port, "third"))
        members[0].tell(do="broadcast", source=0, value=1, elements=10, timeout=60)
        assert members[0].answer()["values"] == [1.0] * 3
        members[0].tell(do="broadcast", source=0, value=2, elements=1000, timeout=60)
        assert members[0].answer()["values"] == [2.0] * 3
        for value, elements in ((1.0, 10), (2.0, 1000)):
            for member in members[1:]:
                member.tell(do="broadcast", source=0, elements=elements, timeout=60)
                assert member.answer()["values"] == [value] * 3
    finally:
        for member in members:
            member.process.kill()
            member.process.wait()
            for path in Path("/dev/shm").glob(f"relaxd-test-pages-{member.process.pid}-*"):
                path.unlink()
