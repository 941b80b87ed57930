"""The address and the interface on which a trainer's ranks meet those of other hosts."""

import re
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from relaxd.process.child import ChildError
from relaxd.process.ports import address_towards, check_reaches, interface_towards
from services.trainer.service.host_ranks import HostRanks
from services.trainer.service.rank_processes import MeetingPlace, RankPool
from tests.integration.trainer.service_kit import make_config

NOWHERE = "255.255.255.255"
"""The broadcast address, to which the system connects no ordinary socket."""


def own_addresses() -> list[tuple[str, str]]:
    """Return this machine's interfaces that are up, with their IPv4 addresses."""
    up = psutil.net_if_stats()
    return [
        (name, one.address)
        for name, found in psutil.net_if_addrs().items()
        for one in found
        if one.family.name == "AF_INET" and up[name].isup
    ]


def meet(advertised: str, other: str) -> MeetingPlace:
    """Return where the ranks of a trainer meet those of a host at another address."""
    config = make_config("model", trainer={"ranks": 2, "hosts": 2})  # type: ignore[arg-type]
    hosts: Any = SimpleNamespace(advertised=advertised, listen="127.0.0.1", config=config)
    ranks = HostRanks(hosts, lambda *_: None, lambda _: None, RankPool({}, None))
    try:
        return ranks._meet(7, [other])
    finally:
        ranks._end_others()  # gives the port back


def test_the_interface_is_the_one_with_the_address_on_the_route() -> None:
    for name, address in own_addresses():
        assert address_towards(address, 1) == address
        assert interface_towards(address, 1) == name
    with pytest.raises(OSError, match="Permission denied"):
        interface_towards(NOWHERE, 1)


def test_an_address_of_no_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    message = "no network interface has the address 127.0.0.1, which is on the route to 127.0.0.1"
    with pytest.raises(OSError, match=re.escape(message)):
        interface_towards("127.0.0.1", 1)


def test_a_connection_that_is_refused_has_reached_its_machine() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        for name, address in own_addresses():
            check_reaches(name, address, unheard.getsockname()[1])


def test_an_interface_that_does_not_reach_a_machine_is_named() -> None:
    (loopback,) = (name for name, address in own_addresses() if address == "127.0.0.1")
    with pytest.raises(OSError, match="no interface 'eth77' with an AF_INET address is on this machine, which has "):
        check_reaches(f"{loopback},eth77", "127.0.0.1", 1)
    message = f"192.0.2.1:50051 is not reached from interface {loopback} (127.0.0.1): "
    with pytest.raises(OSError, match=re.escape(message)):
        check_reaches(loopback, "192.0.2.1", 50051)


def test_ranks_meet_on_the_interface_towards_the_other_host() -> None:
    (loopback,) = (name for name, address in own_addresses() if address == "127.0.0.1")
    place = meet("127.0.0.1", "127.0.0.1:50051")
    assert (place.interface, place.host, place.size, place.attempt) == (loopback, "127.0.0.1", 2, 7)
    assert place.port > 0


@pytest.mark.parametrize("advertised", ["127.0.0.1", "localhost", "::1"])
def test_a_trainer_on_loopback_has_no_hosts_elsewhere(advertised: str) -> None:
    message = (
        f"this trainer listens on {advertised}, where the host at 192.0.2.1:50051 doesn't reach it: "
        "set --host or --advertise (RELAXD_HOST, RELAXD_ADVERTISE) to an address of its network"
    )
    with pytest.raises(ChildError, match=re.escape(message)):
        meet(advertised, "192.0.2.1:50051")


def test_a_host_without_a_route_is_named() -> None:
    with pytest.raises(ChildError, match=f"no meeting place with the host at {NOWHERE}:50051: .*Permission denied"):
        meet("192.0.2.1", f"{NOWHERE}:50051")
