"""Checks of Docker, which `relaxd up --compose` needs."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relaxd.client import CliError
from relaxd.local import compose
from relaxd.replica.gpus import visible_gpus
from relaxd.tools.doctor.finding import Finding, Scope

CALL_SECONDS = 5.0
IMAGE = re.compile(r"^\s*image: (relaxd/\S+)", re.MULTILINE)
CONFIGURE_RUNTIME = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
INSTALL_PLUGIN = "Docker's Compose plugin (https://docs.docker.com/compose/install/linux)"


def check_docker(scope: Scope) -> Iterator[Finding]:
    """Check the Docker engine, its Compose plugin, its GPU runtime and the images of the services."""
    needed = scope.containers
    if shutil.which("docker") is None:
        yield _missing(needed, "docker", "not installed", "Docker (https://docs.docker.com/engine/install)")
        return
    try:
        info, error = _call("info", "--format", "{{json .}}")
        yield from engine_findings(json.loads(info), error, needed, len(visible_gpus()))
        images, unanswered = _call("image", "ls", "--format", "{{.Repository}}:{{.Tag}}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as reason:
        yield _missing(needed, "docker", f"it does not answer: {reason}", "an engine that answers")
        return
    if not unanswered:
        yield from image_findings(images.splitlines())


def engine_findings(info: Mapping[str, Any], error: str, needed: bool, gpus: int) -> Iterator[Finding]:
    """Assess the answer of `docker info`, and its error. A missing part is only a problem if `needed`."""
    plugins = {one["Name"]: one.get("Version", "") for one in info.get("ClientInfo", {}).get("Plugins") or ()}
    if info.get("ServerVersion"):
        yield Finding("ok", "docker", f"engine {info['ServerVersion']}")
        if gpus and "nvidia" not in (info.get("Runtimes") or {}) and not info.get("CDISpecDirs"):
            right, command = "NVIDIA's container toolkit, else containers see no GPUs", CONFIGURE_RUNTIME
            yield _missing(needed, "docker GPUs", "the engine has no runtime nvidia", right, command)
    else:
        why = " ".join(error.split()) or "; ".join(info.get("ServerErrors") or ("no engine answers",))
        right = "an engine that runs, and that this user may call (group docker)"
        yield _missing(needed, "docker", why, right, "sudo systemctl start docker")
    if "compose" in plugins:
        yield Finding("ok", "docker compose", f"plugin {plugins['compose']}")
    else:
        yield _missing(needed, "docker compose", "the plugin is missing", INSTALL_PLUGIN)


def _missing(needed: bool, about: str, found: str, right: str, how: str = "") -> Finding:
    """Return a finding about Docker: a problem if `needed`, otherwise "absent"."""
    if needed:
        return Finding("problem", about, found, right, how)
    return Finding("absent", about, f"{found} (only relaxd up --compose needs it)")


def image_findings(images: Sequence[str]) -> Iterator[Finding]:
    """Report which images of the services exist. Missing images are built when needed."""
    try:
        text = (compose.compose_folder() / "compose.yaml").read_text()
    except CliError:  # outside a source tree there is nothing to build
        return
    wanted = {name.partition(":")[0] for name in IMAGE.findall(text)}
    there = sorted(name for name in images if name.partition(":")[0] in wanted)
    missing = sorted(wanted - {name.partition(":")[0] for name in there})
    found = f"there: {', '.join(there) or 'none'}"
    found += f"; not built: {', '.join(missing)} (relaxd up --compose builds them)" if missing else ""
    yield Finding("ok", "images", found)


def _call(*words: str) -> tuple[str, str]:
    """Return the output of a docker command, and its error if it failed. Raises TimeoutExpired, OSError."""
    done = subprocess.run(
        ["docker", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CALL_SECONDS, check=False
    )
    return done.stdout, done.stderr if done.returncode else ""
