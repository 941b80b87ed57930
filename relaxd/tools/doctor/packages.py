"""Checks of Python packages: the requirements of relaxd's extras, their versions, and the trackers' interpreter."""

import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import relaxd
from relaxd.board import roles_for
from relaxd.config import RunConfig, TrackingConfig
from relaxd.engines import ENGINES
from relaxd.media.placeholders import IMAGE
from relaxd.replica.gpus import visible_gpus
from relaxd.rewards.table import BOXED, PACKAGES
from relaxd.roles import JUDGE, ROLLOUT, TEACHER
from relaxd.tools.doctor import Finding, Level, Scope

SERVICES = ("coordinator", "reward", "advantage", "rollout", "trainer")
"""Names of relaxd's extras (optional dependencies) for the services that `relaxd up` starts."""
OPTIONAL = {
    "sglang": 'rollout.engine = "sglang": README, On GPUs',
    "data": "prompts in Parquet, Arrow and CSV files",
    "media": "images of prompts",
    "video": "video of prompts",
    "reasoning": "source and reward reasoning_gym",
    "humaneval": "evaluation set humaneval",
    "ifeval": "rewards ifeval and ifbench",
    "launcher": "replicas as containers",
    "demo": "relaxd demo, plots, a Redis without an installed one",
    "migrate": "relaxd migrate",
    "mcp": "environment mcp",
}
"""relaxd's other extras (optional dependencies), each with what it is for."""
OWN_ENVIRONMENT = "sglang"
"""Name of the package and extra that requires a certain version of torch, and therefore a separate environment."""
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclass(frozen=True)
class Requirement:
    """A package that relaxd requires, with the suitable versions."""

    name: str
    versions: str
    """Suitable versions of the package, such as ">=2.11,<2.14"; empty: any version."""

    def __str__(self) -> str:
        return f"{self.name}{self.versions}"

    def problem(self, installed: str | None) -> str:
        """Return why the installed version doesn't suit, "" if it does. None: the package isn't installed."""
        if installed is None:
            return f"{self.name} is missing"
        suits = all(_suits(installed, one) for one in self.versions.split(",") if one)
        return "" if suits else f"{self.name} {installed} is not {self.versions}"


def check_packages(scope: Scope) -> Iterator[Finding]:
    """Check that the packages of the services on this machine are installed, for the run if one is given."""
    if not scope.elsewhere:
        yield package_finding("packages", requirements(), _needed(scope))


def check_optional_packages(scope: Scope) -> Iterator[Finding]:
    """Report which optional packages are missing, those that only some runs and commands need."""
    if scope.elsewhere:
        return
    required, needed, missing = requirements(), _needed(scope), {}
    for extra, purpose in OPTIONAL.items():
        if extra not in needed and (lacks := _missing(required.get(extra, ()))):
            missing[f"{', '.join(one.name for one in lacks)} ({purpose})"] = lacks
    level: Level = "absent" if missing else "ok"
    wanted = [one for some in missing.values() for one in some if one.name != OWN_ENVIRONMENT]
    yield Finding(level, "optional packages", "; ".join(missing) or "complete", how=_pip(wanted) if wanted else "")
    if scope.config is None and visible_gpus() and _missing(required.get(OWN_ENVIRONMENT, ())):
        right = 'sglang in an environment for GPUs (README, On GPUs): rollout.engine = "transformers" uses the CPU'
        yield Finding("warning", "sglang", "missing, on a machine with GPUs", right)


def package_finding(about: str, required: Mapping[str, Sequence[Requirement]], extras: Sequence[str]) -> Finding:
    """Assess whether the packages that relaxd and the given extras require are installed, in suitable versions."""
    if not required:
        return Finding("ok", about, "relaxd is not installed as a package, so what it requires is not known")
    wanted = list(dict.fromkeys(one for extra in ("", *extras) for one in required.get(extra, ())))
    problems = {one: problem for one in wanted if (problem := one.problem(_installed(one.name)))}
    if not problems:
        versions = {name: _installed(name) for name in ("torch", "transformers", "megatron-core", "sglang")}
        shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        return Finding("ok", about, f"complete for {', '.join(extras)}: {shown}")
    gone = any(_installed(one.name) is None for one in problems)
    right = f"what {', '.join(extras)} need"
    if any(one.name == OWN_ENVIRONMENT for one in problems):
        right += "; sglang decides the versions of torch, so give it an environment for GPUs (README, On GPUs)"
    return Finding("problem" if gone else "warning", about, ", ".join(problems.values()), right, _pip(list(problems)))


def extras_of(config: RunConfig) -> list[str]:
    """Return the extras that a run's services need. `relaxd config check` reports the extras that its prompts need."""
    roles = roles_for(config)
    engines = {ROLLOUT: config.rollout.engine, JUDGE: config.roles.judge.engine, TEACHER: config.roles.teacher.engine}
    needed = [ENGINES[engine].extra for role, engine in engines.items() if role in roles]
    extras = ["coordinator", "reward", "advantage", *needed, "trainer"]
    extras += ["media"] if config.has_media else []
    extras += ["video"] if set(config.media_kinds) - {IMAGE} else []
    rewards = {config.reward.name, *(term.name for term in config.reward.terms)}
    for name in sorted(rewards):
        _, requirement = PACKAGES.get(name.removeprefix(BOXED), ("", ""))
        extras += re.findall(r"\[(\w+)\]", requirement)
    return list(dict.fromkeys(extras))


def requirements() -> dict[str, list[Requirement]]:
    """Return the packages that each of relaxd's extras requires; those of relaxd itself are under "".

    Reads the source tree's pyproject.toml, else the installed package's metadata.
    """
    project = Path(relaxd.__file__).parents[1] / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text())["project"]
        texts = {"": table["dependencies"], **table["optional-dependencies"]}
        return {extra: [parse(text) for text in lines] for extra, lines in texts.items()}
    try:
        lines = importlib.metadata.requires("relaxd") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[Requirement]] = {}
    for line in lines:
        extra = _EXTRA.search(line)
        found.setdefault(extra[1] if extra else "", []).append(parse(line))
    return found


def parse(text: str) -> Requirement:
    """Parse a requirement such as "torch>=2.11"; extras and markers in it are ignored."""
    match = _REQUIREMENT.match(text)
    assert match is not None
    return Requirement(match[1], match[2].replace(" ", ""))


def _needed(scope: Scope) -> list[str]:
    return extras_of(scope.config) if scope.config else list(SERVICES)


def _missing(wanted: Sequence[Requirement]) -> list[Requirement]:
    return [one for one in wanted if _installed(one.name) is None]


@functools.cache
def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _suits(version: str, bound: str) -> bool:
    """Return True if a version satisfies a bound such as ">=2.11". The version's local part (+cu130) is ignored."""
    match = re.fullmatch(r"(>=|<|==)(.+)", bound)
    if match is None:
        return True
    if match[1] == "==":
        return version.partition("+")[0] == match[2]
    mine, other = _numbers(version), _numbers(match[2])
    return mine >= other if match[1] == ">=" else mine < other


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _pip(wanted: Sequence[Requirement]) -> str:
    return "pip install " + " ".join(f"'{one}'" for one in dict.fromkeys(wanted))


TRACKER_PACKAGES = ("tensorboard", "wandb", "clearml", "trackio")
"""Names of the bundled trackers that need a Python package of the same name."""
START_SECONDS = 10.0
"""Maximum seconds in which the trackers' Python interpreter must report its version and packages."""
MIN_PYTHON = (3, 11)
_LOOK = """
import importlib.util, sys
sys.path.pop(0)  # the current folder may have a folder of a tracker's name
print(*sys.version_info[:2], *(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""
"""Python program that prints its interpreter's version, and which of the packages in its arguments are missing."""


def check_trackers(scope: Scope) -> Iterator[Finding]:
    """Check that the run's trackers, if any, have a working Python interpreter and the packages that they need."""
    if scope.config is not None and scope.config.tracking.trackers and not scope.elsewhere:
        yield trackers_finding(scope.config.tracking)


def trackers_finding(tracking: TrackingConfig) -> Finding:
    """Assess whether the Python interpreter of a run's trackers works and has their packages."""
    about, python = "trackers", tracking.python or sys.executable
    wanted = [name for name in tracking.trackers if name in TRACKER_PACKAGES]
    right = f"an interpreter with {', '.join(wanted)}" if wanted else "an interpreter"
    try:
        done = subprocess.run(
            [python, "-c", _LOOK, *wanted], capture_output=True, text=True, timeout=START_SECONDS, check=True
        )
        major, minor, *missing = done.stdout.split()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        found = f"{python} (tracking.python) can't be used: {error}"
        return Finding("problem", about, found, right, "set tracking.python to a Python 3.11 or newer")
    if (int(major), int(minor)) < MIN_PYTHON:
        found = f"{python} (tracking.python) is Python {major}.{minor}"
        return Finding("problem", about, found, "Python 3.11 or newer", "set tracking.python to one")
    if missing:
        known = {one.name: one for one in requirements().get("trackers", ())}
        packages = " ".join(f"'{known.get(name, Requirement(name, ''))}'" for name in missing)
        whose = "" if tracking.python else ", or set tracking.python to an interpreter that has it"
        how = f"{python} -m pip install {packages}{whose}"
        return Finding("problem", about, f"{python} has no {', '.join(missing)}", right, how)
    return Finding("ok", about, f"{python} has what {', '.join(tracking.trackers)} need")
