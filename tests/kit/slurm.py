"""A real Slurm of several nodes on this machine: a slurmd in each network namespace, with a host name of its own.

Nothing is installed: Debian's packages are downloaded and unpacked. Needs root and iproute2.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.kit.namespaces import NamespacesUnavailable, namespaces
from tests.kit.waiting import wait_until
from tests.warm import programs

PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "munge",
    "libhwloc15",
    "liblua5.1-0",
    "libmunge2",
)
CACHE = Path.home() / ".cache" / "relaxd" / "slurm"
FETCH_SECONDS = 300
REQUEUE_SECONDS = 10
"""Time until a requeued job may start again, which Slurm sets to the lifetime of a credential: 120 s by default."""


class SlurmUnavailable(Exception):
    """Slurm can't be run here; the message is the reason."""


class Slurm:
    """A cluster: munged, slurmctld beside the first node, and one slurmd a node."""

    def __init__(self, folder: Path, nodes: int, stack: contextlib.ExitStack) -> None:
        """Start it. `stack` gets what ends it. Raises SlurmUnavailable."""
        self.root = _packages()
        self.folder = folder
        try:
            self._nodes = stack.enter_context(namespaces(nodes))
        except NamespacesUnavailable as error:
            raise SlurmUnavailable(str(error)) from error
        self._stack = stack
        self.environment = self._configure()
        sbin = self.root / "usr/sbin"
        munge = folder / "munge"
        self._start(
            "munged", [str(sbin / "munged"), "--foreground", "--force", f"--socket={munge}/socket",
            f"--key-file={munge}/key", f"--pid-file={munge}/pid", f"--seed-file={munge}/seed",
            f"--log-file={folder}/munged.log"],
        )  # fmt: skip
        wait_until((munge / "socket").exists, "munged")
        self._start("ctld", [str(sbin / "slurmctld-wlm"), "-D", "-i"], 0)
        for node in range(nodes):
            self.start_node(node)
        wait_until(lambda: self.call("sinfo", "-h", "-o", "%t %D").strip() == f"idle {nodes}", "all nodes are idle", 60)

    def start_node(self, node: int) -> None:
        """Start a node's slurmd."""
        sbin = self.root / "usr/sbin"
        words = [str(sbin / "slurmd-wlm"), "-D", "-N", f"node{node}", "-d", str(sbin / "slurmstepd-wlm")]
        self._start(f"node{node}", words, node)

    def kill_node(self, node: int) -> None:
        """Kill all processes of a node at once, as a loss of power would. Not the first: it has slurmctld."""
        self._nodes[node].kill()

    def address(self, node: int) -> str:
        """Return a node's address."""
        return self._nodes[node].address

    def call(self, *words: str, folder: Path | None = None) -> str:
        """Run one of Slurm's commands beside slurmctld and return its output. Raises CalledProcessError."""
        return _run(*self._nodes[0].command(words), environment=self.environment, folder=folder)

    def job(self, job: str) -> dict[str, str]:
        """Return the fields of a job, such as JobState, Restarts and NodeList."""
        fields = self.call("scontrol", "-o", "show", "job", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def _configure(self) -> dict[str, str]:
        """Write slurm.conf and the key of munge. Returns the environment of all programs."""
        state = self.folder
        for name in ("ctld", "munge", *(f"spool-node{node}" for node in range(len(self._nodes)))):
            (state / name).mkdir(parents=True)
        (state / "munge").chmod(0o711)
        key = state / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        plugins = next(self.root.rglob("auth_munge.so")).parent
        lines = [
            "ClusterName=test", f"SlurmctldHost=ctld({self._nodes[0].address})", "SlurmUser=root", "SlurmdUser=root",
            f"PluginDir={plugins}",
            "AuthType=auth/munge", f"AuthInfo=socket={state}/munge/socket,cred_expire={REQUEUE_SECONDS}",
            "CredType=cred/munge",
            "MpiDefault=none", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core", f"StateSaveLocation={state}/ctld", f"SlurmdSpoolDir={state}/spool-%n",
            f"SlurmctldPidFile={state}/ctld.pid", f"SlurmdPidFile={state}/%n.pid", f"SlurmctldLogFile={state}/ctld.log",
            f"SlurmdLogFile={state}/%n.log", "ReturnToService=2", "SlurmdTimeout=10", "KillWait=5", "JobRequeue=1",
            "SchedulerParameters=sched_interval=2", "InactiveLimit=0", "MailProg=/bin/true",
            *(f"NodeName=node{number} NodeAddr={node.address} NodeHostname=node{number} CPUs=2 RealMemory=4000 "
              "State=UNKNOWN" for number, node in enumerate(self._nodes)),
            "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]  # fmt: skip
        (state / "slurm.conf").write_text("\n".join(lines) + "\n")
        # slurmd wants a cgroup plugin, also when nothing uses it; version 1's does not look at the machine's hierarchy.
        (state / "cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={state}/cgroup\nConstrainCores=no\nConstrainRAMSpace=no\n"
        )
        inherited = dict(os.environ)
        inherited.pop(programs.PYTHON, None)  # a fork of a nursery would run in the nursery's namespace
        return {
            **inherited,
            "SLURM_CONF": str(state / "slurm.conf"),
            "LD_LIBRARY_PATH": ":".join(sorted({str(path.parent) for path in self.root.rglob("*.so*")})),
            "PATH": f"{self.root}/usr/bin:{self.root}/usr/sbin:{os.environ['PATH']}",
        }

    def _start(self, name: str, words: list[str], node: int | None = None) -> None:
        """Start a program, in a node with the host name `name` if one is given."""
        if node is not None:
            named = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh", *words]
            words = self._nodes[node].command(named)
        with (self.folder / f"{name}.out").open("w") as output:
            process = subprocess.Popen(
                words, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        self._stack.callback(_end, process)


@contextlib.contextmanager
def slurm_cluster(folder: Path, nodes: int) -> Iterator[Slurm]:
    """Yield a cluster, which is ended afterwards with all that runs in it. Raises SlurmUnavailable."""
    with contextlib.ExitStack() as stack:
        slurm = Slurm(folder, nodes, stack)
        stack.callback(lambda: [slurm.kill_node(node) for node in range(nodes)])
        yield slurm


def _packages() -> Path:
    """Return the folder with the unpacked packages, which are downloaded first if need be."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "apt-get", "dpkg"))):
        raise SlurmUnavailable("it needs root, iproute2 and Debian's apt-get and dpkg")
    (CACHE / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        root = CACHE / "root"
        if not root.exists():
            words = ["apt-get", "install", "-y", "--download-only", "--no-install-recommends", "-o"]
            words += [f"Dir::Cache::archives={CACHE}/archives", *PACKAGES]
            fetched = subprocess.run(words, capture_output=True, text=True, timeout=FETCH_SECONDS)
            if fetched.returncode:
                raise SlurmUnavailable(f"its packages can't be had: {fetched.stderr.strip()[-300:]}")
            for package in (CACHE / "archives").glob("*.deb"):
                _run("dpkg", "-x", str(package), str(CACHE / "unpacked"))
            (CACHE / "unpacked").rename(root)
    return root


def _run(*words: str, environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    """Run a command and return its output. Raises CalledProcessError."""
    return subprocess.run(
        words, env=environment, cwd=folder, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def _end(process: "subprocess.Popen[bytes]") -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            return
