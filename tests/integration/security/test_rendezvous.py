"""Weight groups and ranks ask nobody who they are: they listen where they have to, and nowhere else."""

import psutil
import pytest

from relaxd.rpc.service_settings import ServiceSettings
from relaxd.weights.weight_group import host_store
from services.trainer.service.server import _store_host


def addresses(port: int) -> set[str]:
    """Where this process listens on a port."""
    found = psutil.Process().net_connections("tcp")
    return {place.laddr.ip for place in found if place.laddr.port == port and place.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", {"127.0.0.1"}), ("127.0.0.2", {"127.0.0.2"})])
def test_a_store_listens_on_its_address_only(host, expected):
    store = host_store(host)
    assert addresses(store.port) == expected
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_store_for_everyone_listens_everywhere(host):
    store = host_store(host)
    assert addresses(store.port) & {"::", "0.0.0.0"}


@pytest.mark.parametrize(
    ("host", "advertise", "expected"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1:50051", "127.0.0.1"),
        ("10.0.0.2", "", "10.0.0.2"),
        ("[::1]", "", "::1"),
        ("10.0.0.2", "192.0.2.7:50051", ""),  # behind address translation: others come from wherever
        ("0.0.0.0", "", "0.0.0.0"),
    ],
)
def test_the_store_listens_where_the_trainer_does(host, advertise, expected):
    assert _store_host(ServiceSettings(role="trainer", host=host, advertise=advertise)) == expected
