"""Which container this process runs in, from mount tables as Docker makes them."""

from pathlib import Path

from relaxd.rpc.container_id import container_id
from relaxd.rpc.service_settings import parse_settings

ID = "14cd870b9ccadaf2dfaee04eacee37fb260669aa8e970fea5b8f5a3771730cef"
OTHER = "b802db69c459fa386f6798dfa1e791b918e4af892eddfba32b2be2ef04a67916"
DOCKER = f"""\
72 61 0:43 / / rw,relatime - overlay overlay rw,lowerdir=/var/lib/docker/overlay2/l/ABC
80 72 254:0 /var/lib/docker/containers/{OTHER}/hostname /logs/hostname ro - ext4 /dev/vda rw
89 72 254:0 {{folder}}/{ID}/resolv.conf /etc/resolv.conf rw,relatime - ext4 /dev/vda rw
90 72 254:0 {{folder}}/{ID}/hostname /etc/hostname rw,relatime - ext4 /dev/vda rw
91 72 254:0 {{folder}}/{ID}/hosts /etc/hosts rw,relatime - ext4 /dev/vda rw
"""
HOST = "24 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n25 24 0:22 / /proc rw - proc proc rw\n"


def test_the_id_is_found_whatever_the_host_is_called(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    for folder in ("/var/lib/docker/containers", "/containers"):  # on the root file system, on one of Docker's own
        mounts.write_text(DOCKER.format(folder=folder))
        assert container_id(mounts) == ID[:12]


def test_outside_of_a_container_there_is_none(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(HOST)
    assert container_id(mounts) == ""
    assert container_id(tmp_path / "absent") == ""


def test_it_names_the_replica_and_its_instance(monkeypatch) -> None:
    monkeypatch.setattr("relaxd.rpc.service_settings.container_id", lambda: ID[:12])
    settings = parse_settings("trainer", [], {})
    assert settings.instance == ID[:12]
    assert settings.replica_id.startswith(f"trainer-{ID[:12]}-")
    assert parse_settings("trainer", [], {"RELAXD_INSTANCE": "mine"}).instance == "mine"
