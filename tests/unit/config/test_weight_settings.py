"""Settings of weight synchronisation: what would stop a run is refused."""

import contextlib
import re
import socket

import pytest
from pydantic import ValidationError

from relaxd.config import RunConfig
from relaxd.process.ports import NoFreePort, ReservedPort, listen, reserve_port
from relaxd.weights.weight_group import host_store
from tests.kit.ports import free_port as own_port


def config(weights: dict[str, object], **board: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"steps": 3},
            "model": {"path": "m"},
            "data": {"source": "addition"},
            "reward": {"name": "addition"},
            "weights": weights,
            "board": board,
        }
    )


@pytest.mark.parametrize(("interval", "staleness"), [(1, 0), (2, 1), (3, 2), (3, 8)])
def test_intervals_whose_steps_can_be_filled(interval: int, staleness: int) -> None:
    assert config({"interval": interval}, max_staleness=staleness).weights.interval == interval


@pytest.mark.parametrize(("interval", "staleness"), [(2, 0), (3, 1), (100, 98)])
def test_an_interval_that_would_stop_the_run(interval: int, staleness: int) -> None:
    expected = (
        f"weights.interval is {interval}, but board.max_staleness is {staleness}: .* set weights.interval to at most "
        f"{staleness + 1}, or board.max_staleness to at least {interval - 1}"
    )
    with pytest.raises(ValidationError, match=expected):
        config({"interval": interval}, max_staleness=staleness)


def test_a_range_of_ports() -> None:
    assert config({}).weights.port_range is None
    assert config({"ports": "29500-29501"}).weights.port_range == range(29500, 29502)


@pytest.mark.parametrize(
    ("ports", "wrong"),
    [
        ("29500-29500", "which are 1: a trainer needs 2"),
        ("29501-29500", "it must be FIRST-LAST, from 1024 to 65535"),
        ("80-90", "it must be FIRST-LAST"),
        ("65000-65536", "it must be FIRST-LAST"),
        ("29500", 'weights.ports is "29500": it must be like "29500-29599"'),
    ],
)
def test_ranges_that_are_refused(ports: str, wrong: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(wrong)):
        config({"ports": ports})


def test_a_free_port_of_the_range() -> None:
    first = own_port()
    with socket.create_server(("127.0.0.1", first)):
        with reserve_port("127.0.0.1", range(first, first + 1000)) as port:
            assert port.number in range(first + 1, first + 1000)
        with listen("127.0.0.1", range(first, first + 1000)) as listener:
            assert first < listener.getsockname()[1] < first + 1000
        with pytest.raises(NoFreePort, match=f'weights.ports is "{first}-{first}", but something listens on each'):
            reserve_port("127.0.0.1", range(first, first + 1))
    with reserve_port("127.0.0.1", range(first, first + 1)) as port:
        assert port.number == first


def test_a_reserved_port_is_given_to_nobody_but_its_server() -> None:
    with contextlib.ExitStack() as stack:
        ports = {stack.enter_context(ReservedPort("127.0.0.1")).number for _ in range(200)}
        assert len(ports) == 200
        try:
            server = stack.enter_context(socket.create_server(("127.0.0.1", min(ports))))
        except OSError:
            pytest.skip("this system lets no server listen on a port that is bound")
        with pytest.raises(OSError, match="in use"):
            ReservedPort("127.0.0.1", server.getsockname()[1])
        given = set()
        for reuse in (False, True) * 1000:
            with socket.socket() as any_port:
                any_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                any_port.bind(("127.0.0.1", 0))
                given.add(any_port.getsockname()[1])
        assert not given & ports


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_the_store_is_on_a_port_of_the_range(host: str) -> None:
    port = own_port()
    store = host_store(host, ports=range(port, port + 1))
    assert store.port == port
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_host_that_is_not_this_machine_is_not_called_taken() -> None:
    with pytest.raises(OSError, match=r"assign requested address|not available") as raised:
        listen("192.0.2.1", range(29500, 29600))
    assert not isinstance(raised.value, NoFreePort)
