"""Suggestions for an unknown setting: the equivalent of another framework's setting, else the nearest name."""

import difflib

from relaxd.config.algorithm import BUILT_IN, OWN
from relaxd.config.other_frameworks import EQUIVALENTS, Equivalent
from relaxd.config.settings_table import Place, sections, settings

ALMOST_EQUAL = 0.85
"""Minimum similarity, from 0 to 1, at which a wrong name counts as a typo, not as another framework's name."""

SYNONYMS = {"every": "interval", "interval": "every"}
"""Synonyms that different sections use for the number of steps between two events."""

_PENALTY = (
    "there are no penalties: tokens would be sampled from another distribution than the one whose log-probs are trained"
)
RUN_ID = "the run's id, which names its folder, is the option --run-id"

REFUSED = {
    **{("run", name): RUN_ID for name in ("id", "name", "run_id", "run_name")},
    ("rollout", "presence_penalty"): _PENALTY,
    ("rollout", "frequency_penalty"): _PENALTY,
    ("data", "presence_penalty"): _PENALTY,
    ("data", "frequency_penalty"): _PENALTY,
    ("data", "temperature"): "all sources have rollout.temperature, at which the trainer computes log-probs",
}
"""Reasons why relaxd lacks a setting, by its first section and its name."""


def suggest(place: Place, algorithm: str = "") -> str:
    """Suggest what an unknown setting means: its equivalent here, the nearest name, or all names of its section.

    `algorithm` is the tag of the run's algorithm (`relaxd.config.algorithm.tag_of`): each algorithm has other settings.
    """
    if refused := REFUSED.get((place[0], place[-1])):
        return refused
    return (algorithm and _of_others(place, algorithm)) or elsewhere(place) or _nearest(place, algorithm)


def elsewhere(place: Place) -> str:
    """Return the meaning of an unknown setting in another framework, and its equivalent here; empty if there is
    none."""
    if (found := find(place)) is None or _is_ours(place):
        return ""
    framework, name, equivalent = found
    if not equivalent.setting:
        return f"{equivalent.note} ({framework}'s {name})"
    return f"{framework}'s {name} is {equivalent.setting} here" + (f": {equivalent.note}" if equivalent.note else "")


def is_elsewhere(place: Place) -> bool:
    """Return True if another framework has this setting, and no section here is spelled almost like its first
    section."""
    near = difflib.get_close_matches(place[0], [section[0] for section in sections()], n=1, cutoff=ALMOST_EQUAL)
    return not near and find(place) is not None


def find(place: Place) -> tuple[str, str, Equivalent] | None:
    """Find a setting of another framework. Returns framework, name there, and equivalent; None if none has it.

    A name matches in any section ("trainer.num_generations"), without its first sections ("rollout.n"), and as a flag
    or a path ("rollout.stop" is --rollout-stop).
    """
    wanted = _parts(".".join(place))
    for equivalent in EQUIVALENTS:
        for framework, names in equivalent.names.items():
            for name in names:
                parts = _parts(name)
                if wanted[-len(parts) :] == parts or (len(wanted) > 1 and parts[-len(wanted) :] == wanted):
                    return framework, name, equivalent
                if name.startswith("--") and "_".join(wanted) == parts[0]:
                    return framework, name, equivalent
    return None


def homes(name: str) -> list[Place]:
    """Return the places of all settings with this last name."""
    return [place for place in settings() if place[-1] == name]


def _of_others(place: Place, algorithm: str) -> str:
    """Return which other algorithms have this setting; empty if none has it."""
    others = [name for name in (*BUILT_IN, OWN) if place in settings(name)]
    if not others:
        return ""
    return f"it is a setting of algorithm.name = {' or '.join(map(repr, others))}, not of {algorithm!r}"


def _parts(name: str) -> Place:
    return tuple(name.lstrip("-").replace("-", "_").lower().split("."))


def _is_ours(place: Place) -> bool:
    """Return True for a misspelt name of this section, and for a name that another section has."""
    slip = difflib.get_close_matches(place[-1], _siblings(place), n=1, cutoff=ALMOST_EQUAL)
    return bool(slip) or (place[:-1] in sections() and bool(homes(place[-1])))


def _siblings(place: Place, algorithm: str = "") -> list[str]:
    return [known[-1] for known in (*settings(algorithm), *sections()) if known[:-1] == place[:-1]]


def _nearest(place: Place, algorithm: str) -> str:
    parent, siblings = place[:-1], _siblings(place, algorithm)
    if close := difflib.get_close_matches(place[-1], siblings, n=1, cutoff=0.6):
        # "train_path" is like "eval_path", and may be "path".
        close += [name for name in place[-1].split("_") if name in siblings and name not in close]
        return f"did you mean {' or '.join('.'.join((*parent, name)) for name in close)}?"
    if (synonym := SYNONYMS.get(place[-1])) in siblings:
        return f"did you mean {'.'.join((*parent, synonym))}?"
    names = {known[-1]: known for known in (*settings(), *sections())}
    found = homes(place[-1]) or [names[name] for name in difflib.get_close_matches(place[-1], names, n=1, cutoff=0.75)]
    if found:
        return f"did you mean {' or '.join('.'.join(known) for known in found)}?"
    if not siblings:
        return f"there is no section [{'.'.join(parent)}]"
    where = f"[{'.'.join(parent)}] has" if parent else "the sections are"
    return f"{where} {', '.join(siblings)}"
