"""Id of the container in which this process runs. Imports only the standard library: a test runs it in a bare image."""

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_DOCKER_FILE = re.compile(r" \S*/containers/([0-9a-f]{64})/\S+ /etc/(?:hostname|hosts|resolv\.conf) ")


def container_id(mounts: Path = _MOUNTS) -> str:
    """Return the short id (12 hexadecimal digits) of the Docker container that this process runs in; "" outside.

    Docker mounts /etc/hostname, /etc/hosts and /etc/resolv.conf from a folder named by the full id. The host name may
    differ from the id (`uts: host`, `network_mode: host`, `hostname: ...`), and with cgroups v2 /proc/self/cgroup does
    not have it.

    Args:
        mounts: the mount table to read, as in proc_pid_mountinfo(5).
    """
    try:
        found = _DOCKER_FILE.search(mounts.read_text(encoding="utf-8", errors="replace"))
    except OSError:  # not Linux
        return ""
    return found[1][:12] if found else ""
