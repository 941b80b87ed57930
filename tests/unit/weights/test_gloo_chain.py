"""The chain of a weight group, whose members are threads of this process."""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from relaxd.weights.buckets import checksum
from relaxd.weights.gloo import PIECE_BYTES
from relaxd.weights.weight_group import Rendezvous, Transport, WeightGroup, WeightGroupError, host_store

SIZE = 4
PROMPT = 20.0
"""Seconds of a busy machine for what happens at once."""
STORE = host_store()
Calls = Callable[..., list[Any]]


@pytest.fixture(autouse=True, scope="module")
def groups_have_ended() -> Iterator[None]:
    """A thread that is still in gloo when Python ends has the process abort."""
    before = threading.enumerate()
    yield
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(PROMPT)


def members(name: str, transport: Transport = "gloo_chain") -> list[WeightGroup]:
    """Return a connected group."""
    place = Rendezvous(transport=transport, store_port=STORE.port, name=name, world_size=SIZE)
    group = [WeightGroup(place, rank) for rank in range(SIZE)]
    everywhere(group, lambda member: member.connect(PROMPT))
    return group


def everywhere(group: list[WeightGroup], call: Callable[[WeightGroup], Any]) -> list[Any]:
    """Make a call on each member at once; an answer is its result or its WeightGroupError."""

    def attempt(member: WeightGroup) -> Any:
        try:
            return call(member)
        except WeightGroupError as error:
            return error

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(attempt, group))


@pytest.mark.parametrize("transport", ["gloo", "gloo_chain"])
def test_each_member_logs_the_address_that_it_sends_from(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relaxd.weights.weight_group")
    for member in members(f"logged-{transport}", transport):
        member.abort()
    told = {
        f"weight group logged-{transport}: rank {rank} of {SIZE}, {transport} from 127.0.0.1" for rank in range(SIZE)
    }
    assert {record.getMessage() for record in caplog.records} == told


@pytest.mark.parametrize(
    ("variables", "told"),
    [({}, ", nccl"), ({"NCCL_SOCKET_IFNAME": "=eth7"}, ", nccl with NCCL_SOCKET_IFNAME==eth7")],
)
def test_a_member_on_a_gpu_logs_the_interfaces_that_nccl_may_take(
    variables: dict[str, str], told: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "relaxd.weights.weight_group")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = Rendezvous(transport="nccl", store_port=STORE.port, name=f"logged{told}", world_size=1)
    with pytest.raises(WeightGroupError, match="nccl needs a GPU, none was given"):  # after it has met the others
        WeightGroup(place, 0).connect(PROMPT)
    (record,) = caplog.records
    assert record.getMessage().endswith(f": rank 0 of 1{told}")


@pytest.mark.parametrize("source", range(SIZE))
def test_every_member_gets_the_bits_that_a_broadcast_brings(source: int) -> None:
    torch.manual_seed(source)
    sent = [
        torch.randn(1000),
        torch.randint(0, 256, (3 * PIECE_BYTES + 5,), dtype=torch.uint8),
        torch.tensor([float("nan"), -0.0], dtype=torch.bfloat16),
        torch.randn(PIECE_BYTES // 4),
    ]
    found = {}
    for transport in ("gloo", "gloo_chain"):
        group = members(f"{transport}-{source}", transport)

        def receive(member: WeightGroup) -> list[int]:
            own = member.rank == source
            tensors = [tensor.clone() if own else torch.zeros_like(tensor) for tensor in sent]
            batches = [tensors[:2], tensors[2:3], tensors[3:]]
            transfers = [member.start_broadcasts(batch, source, PROMPT) for batch in batches]
            for transfer in transfers:
                transfer.wait()
            return [checksum(tensor) for tensor in tensors]

        found[transport] = everywhere(group, receive)
        for member in group:
            member.abort()
    assert found["gloo_chain"] == found["gloo"] == [[checksum(tensor) for tensor in sent]] * SIZE


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Keep Python from closing what is garbage except for a reference cycle."""
    gc.disable()
    yield
    gc.enable()


def test_the_loss_of_any_member_ends_it_for_all(no_collection: None) -> None:
    before = threading.enumerate()
    group = members("loss")
    tensors = [torch.full((4 * PIECE_BYTES,), 7, dtype=torch.uint8) for _ in group]

    def take_part(member: WeightGroup) -> None:
        if member.rank == 2:  # between others, of which the first one never hears from it
            time.sleep(0.2)
            member.abort()
            return
        member.broadcast(tensors[member.rank], 0, 60.0)
        member.broadcast(tensors[member.rank], 0, 60.0)

    began = time.monotonic()
    answers = everywhere(group, take_part)
    assert time.monotonic() - began < PROMPT
    for member, answer in zip(group, answers, strict=True):
        if member.rank != 2:
            assert "loss" in str(answer)
            with pytest.raises(WeightGroupError, match="weight group loss is not connected"):
                member.broadcast(tensors[0], 0, 1.0)
    # Each has let go of its sockets: a send to one that hasn't waits in gloo until its deadline.
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(PROMPT)
            assert not thread.is_alive(), f"{thread.name} still waits"


def test_a_member_that_waits_leaves_at_its_deadline() -> None:
    group = members("late")
    began = time.monotonic()
    with pytest.raises(WeightGroupError, match=r"0\.5 s|500ms"):
        group[3].broadcast(torch.zeros(10), 0, 0.5)
    assert time.monotonic() - began < PROMPT
    for member in group:
        member.abort()
