"""Loading of a `RunConfig` from TOML and command-line overrides. Errors name the place, the value and the remedy: for
an unknown setting, the equivalent of another framework's setting, else the nearest name."""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from relaxd.config.algorithm import BUILT_IN, OWN
from relaxd.config.other_frameworks import EQUIVALENTS, Equivalent
from relaxd.config.run import RunConfig
from relaxd.config.section import with_setting
from relaxd.config.settings_table import Place, sections, settings
from relaxd.config.write_toml import toml

ALMOST_EQUAL = 0.85
"""Minimum similarity, from 0 to 1, at which a wrong name counts as a typo, not as another framework's name."""

SYNONYMS = {"every": "interval", "interval": "every"}
"""Synonyms of setting names that different sections use for the number of steps between two events."""

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
"""Reasons why relaxd lacks a setting, by the setting's first section and its last name."""


def suggest(place: Place, algorithm: str = "") -> str:
    """Suggest what an unknown setting means: its equivalent in relaxd, the nearest name, or all names of its section.

    `algorithm` is the tag of the run's algorithm (`relaxd.config.algorithm.tag_of`): each algorithm has other settings.
    """
    if refused := REFUSED.get((place[0], place[-1])):
        return refused
    return (algorithm and _of_others(place, algorithm)) or elsewhere(place) or _nearest(place, algorithm)


def elsewhere(place: Place) -> str:
    """Return a hint on an unknown setting of another framework, with its equivalent in relaxd; "" if there is none."""
    if (found := find(place)) is None or _is_ours(place):
        return ""
    framework, name, equivalent = found
    if not equivalent.setting:
        return f"{equivalent.note} ({framework}'s {name})"
    return f"{framework}'s {name} is {equivalent.setting} here" + (f": {equivalent.note}" if equivalent.note else "")


def is_elsewhere(place: Place) -> bool:
    """Return True if another framework has this setting, and no relaxd section has a name like the setting's first
    section."""
    near = difflib.get_close_matches(place[0], [section[0] for section in sections()], n=1, cutoff=ALMOST_EQUAL)
    return not near and find(place) is not None


def find(place: Place) -> tuple[str, str, Equivalent] | None:
    """Find a setting of another framework. Returns the framework, the setting's name there, and its equivalent in
    relaxd; None if no framework has it.

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
    """Return the places of all settings whose last name, after the sections, is `name`."""
    return [place for place in settings() if place[-1] == name]


def _of_others(place: Place, algorithm: str) -> str:
    """Return a sentence that names the other algorithms with this setting; "" if no algorithm has it."""
    others = [name for name in (*BUILT_IN, OWN) if place in settings(name)]
    if not others:
        return ""
    return f"it is a setting of algorithm.name = {' or '.join(map(repr, others))}, not of {algorithm!r}"


def _parts(name: str) -> Place:
    return tuple(name.lstrip("-").replace("-", "_").lower().split("."))


def _is_ours(place: Place) -> bool:
    """Return True if the name is a misspelt name of its section, or the name of a setting in another section."""
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


MAX_CHARACTERS = 1 << 18
"""Maximum length of a configuration, in characters. Prompts, rewards and long templates belong in separate files."""
MAX_SETTINGS = 10_000
MAX_NAME = 200
"""Maximum length of a TOML key, in characters."""
MAX_DEPTH = 32
"""Maximum nesting depth of tables and lists in a configuration. relaxd's own settings have five levels."""
_DEEP_KEY = re.compile(r"""(?<![\w"'-])(?:(?:[\w-]+|"[^"\n]{0,99}"|'[^'\n]{0,99}')[ \t]*\.[ \t]*){33}""")
_LONG_NUMBER = re.compile(r"(?<!\w)(0x)?[0-9a-fA-F_]{3500,}")
MAX_PROBLEMS = 50
MAX_SHOWN = 100
"""Maximum length of a wrong line or name that an error shows or compares, in characters."""


@dataclass(frozen=True)
class Problem:
    """A mistake in a configuration."""

    setting: str
    """Dotted name of the setting, such as "rollout.top_p"; empty for the whole configuration."""
    message: str
    """Description of the mistake and its remedy."""
    source: str = ""
    """Origin of the setting: "FILE line 12" or "--rollout.top_p"; empty if it was not set."""

    def __str__(self) -> str:
        head = f"{self.source}: " if self.source else ""
        return head + with_setting(self.setting, self.message)


class ConfigError(ValueError):
    """An invalid configuration. `problems` has every mistake, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


def load(toml_text: str, overrides: Sequence[str] = (), *, name: str = "configuration") -> RunConfig:
    """Parse and validate a configuration.

    `overrides` are command-line words such as ["--rollout.top_p", "0.9", "--run.steps=4"]; their values are parsed
    as TOML or, if that fails or the setting is a text, taken as text. `name` names the configuration in errors, usually
    by its path. Raises `ConfigError` with every problem found.
    """
    try:
        data = parse_toml(toml_text)
    except LimitError as error:
        raise ConfigError([Problem("", str(error), f"{name} line {error.line}" if error.line else name)]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_syntax_problem(error, toml_text, name)]) from error
    sources = {place: f"{name} line {line}" for place, line in _lines(toml_text)}
    for place, value in _parse_overrides(overrides):
        option = "--" + ".".join(place)
        _set(data, place, value, option)
        sources[place] = option
    try:
        # Strict JSON keeps "8", true and 8.5 from passing for an integer, and still reads a text as a path.
        return RunConfig.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(_shown(error, sources)) from error


def load_file(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration file at `path`, as `load` does. Raises `ConfigError`, also when the file can't be read."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)  # enough to see that it is too long
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([Problem("", f"cannot read the configuration: {reason}", str(path))]) from error
    return load(text, overrides, name=str(path))


def load_recorded(text: str, run_id: str) -> RunConfig:
    """Read a run's recorded configuration, which is JSON. Missing settings get their defaults.

    Raises ConfigError if a version of relaxd with other settings wrote it.
    """
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        why = (
            f"run {run_id} was made by a version of relaxd with other settings: use that one, which its code.json names"
        )
        raise ConfigError([Problem("", why), *explain(error)]) from error


def override(name: str, value: Any) -> str:
    """Return the command-line word that sets a setting to a value."""
    known = settings().get(tuple(name.split(".")))
    return f"--{name}={value if isinstance(value, str) and known is not None and known.takes_text else toml(value)}"


def explain(error: ValidationError, section: Place = ()) -> list[Problem]:
    """Convert pydantic's validation errors in a section, such as ("algorithm",), to `Problem`s."""
    return [
        problem
        for details in error.errors()
        for problem in _problems({**details, "loc": (*section, *details["loc"])}, {})
    ]


# --- TOML within limits --------------------------------------------------------------------------------------------
# Without limits, tomllib and pydantic take minutes for a million keys, and Python's errors for deep nesting and long
# numbers don't say what is wrong.


class LimitError(ValueError):
    """TOML that exceeds a configuration's limits, even if it is valid. `line` is 0 if unknown."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a configuration's TOML. Raises LimitError if it exceeds a limit, TOMLDecodeError if it isn't TOML."""
    if len(text) > MAX_CHARACTERS:
        raise LimitError(f"has more than {MAX_CHARACTERS:,} characters: prompts and long texts belong into files")
    if text.count("=") > MAX_SETTINGS:
        raise LimitError(f"has {text.count('='):,} settings, and may have {MAX_SETTINGS:,}")
    if deep := _DEEP_KEY.search(text):
        raise LimitError(f"has a key of more than {MAX_DEPTH} names with dots between", _line_of(text, deep))
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise LimitError(f"has tables or lists that are more than {MAX_DEPTH} deep") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's limit for integers in decimal
        number = _LONG_NUMBER.search(text)
        line = _line_of(text, number) if number else 0
        raise LimitError("has a number of more than 4,300 digits: whole numbers have 64 bits", line) from None
    _check_limits(data)
    return data


def _line_of(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


def _check_limits(data: dict[str, Any]) -> None:
    pending: list[tuple[str, int, Any]] = [("", 1, data)]
    while pending:
        place, depth, value = pending.pop()
        if depth > MAX_DEPTH:
            raise LimitError(f"has tables or lists that are more than {MAX_DEPTH} deep, at {place[:MAX_NAME]}")
        if isinstance(value, dict):
            if longest := next((key for key in value if len(key) > MAX_NAME), None):
                raise LimitError(f"has a key of {len(longest):,} characters, {longest[:40]!r}...")
            pending += [(f"{place}.{key}" if place else key, depth + 1, inner) for key, inner in value.items()]
        elif isinstance(value, list):
            pending += [(place, depth + 1, inner) for inner in value]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise LimitError(f"has a number of {value.bit_length():,} bits, {place}: whole numbers have 64 bits")


# --- lines of settings -----------------------------------------------------------------------------------------------


def _lines(text: str) -> Iterator[tuple[Place, int]]:
    """Yield the place and the line number of every table header and key, for TOML with one key per line."""
    table: Place = ()
    closing = ""  # the quotes that end the multi-line text we are in
    for number, line in enumerate(text.splitlines(), start=1):
        if closing:
            if closing in line:
                closing = ""
            continue
        if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line):
            table = _split_key(header[1])
            yield table, number
        elif key := re.match(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""", line):
            yield table + _split_key(key[1]), number
            for quotes in ('"""', "'''"):
                if line.count(quotes) == 1:
                    closing = quotes


def _split_key(key: str) -> Place:
    return tuple(part.strip().strip("\"'") for part in key.split("."))


def _syntax_problem(error: tomllib.TOMLDecodeError, text: str, name: str) -> Problem:
    message = str(error)
    match = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", message)
    reason = message[: match.start()].strip() if match else message
    last = max(1, len(text.splitlines()))
    number = int(match[1]) if match and match[1] else last
    shown = text.splitlines()[number - 1].strip()[:MAX_SHOWN] if text.splitlines() and number <= last else ""
    advice = "write settings as: key = value, with texts in quotes, below a [section]"
    return Problem("", f"not valid TOML: {reason}, in: {shown!r} ({advice})", f"{name} line {number}")


# --- overrides -----------------------------------------------------------------------------------------------------


def _parse_overrides(words: Sequence[str]) -> Iterator[tuple[Place, Any]]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not re.match(r"--[A-Za-z_]", word):
            raise ConfigError([Problem("", f"expected --section.key value, found {word!r}")])
        option, equals, value = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError([Problem("", f"--{option} needs a value: --{option} VALUE")])
            value = rest.pop(0)
        place = tuple(part.replace("-", "_") for part in option.split("."))
        if len(place) > MAX_DEPTH:
            raise ConfigError([Problem("", f"--{option[:MAX_SHOWN]}... has more than {MAX_DEPTH} names")])
        if len(place) < 2:
            known = " or ".join(f"--{'.'.join(home)}" for home in homes(place[0]))
            advice = REFUSED.get(("run", place[0])) or (f"did you mean {known}?" if known else elsewhere(place))
            advice = advice or "settings are given as --section.key value"
            raise ConfigError([Problem("", f"unknown option --{option}; {advice}")])
        yield place, _override_value(place, value)


def _override_value(place: Place, text: str) -> Any:
    setting = settings().get(place)
    if setting is not None and setting.takes_text:
        return text
    try:
        parsed = parse_toml(f"value = {text}")
    except LimitError as error:
        raise ConfigError([Problem("", str(error), "--" + ".".join(place))]) from error
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _set(data: dict[str, Any], place: Place, value: Any, option: str) -> None:
    """Set the value at a path of a tree of tables. A number in the path is an index in a list of tables: ("eval",
    "sets", "0", "k")."""
    table: Any = data
    for depth, part in enumerate(place[:-1], start=1):
        if isinstance(table, dict):
            table = table.setdefault(part, {})
        elif part.isdecimal() and int(part) < len(table):
            table = table[int(part)]
        else:
            raise _no_entry(place[: depth - 1], table, option)
        if not isinstance(table, dict | list):
            raise ConfigError([Problem("", f"{'.'.join(place[:depth])} is a value, not a section", option)])
    if isinstance(table, list):
        raise _no_entry(place[:-1], table, option)
    table[place[-1]] = value


def _no_entry(place: Place, entries: Sequence[Any], option: str) -> ConfigError:
    name = ".".join(place)
    return ConfigError(
        [Problem("", f"{name} is a list of {len(entries)}: settings of the first are {name}.0.NAME", option)]
    )


# --- pydantic's errors as problems ---------------------------------------------------------------------------------


def _shown(error: ValidationError, sources: Mapping[Place, str]) -> list[Problem]:
    """Convert validation errors to problems, at most MAX_PROBLEMS: each conversion compares with the names of all
    settings."""
    found = (one for details in error.errors() for one in _problems(details, sources))
    problems = list(islice(found, MAX_PROBLEMS))
    if next(found, None) is not None:
        problems.append(Problem("", f"these are the first {MAX_PROBLEMS} problems: there are more"))
    return problems


def _problems(details: ErrorDetails, sources: Mapping[Place, str]) -> list[Problem]:
    """Convert a validation error to problems. An unknown section that holds settings of other frameworks gives a
    problem for each setting, any other error a single problem."""
    place, algorithm = tuple(str(part) for part in details["loc"]), ""
    if place[:1] == ("algorithm",) and place[1:2] and place[1] in (*BUILT_IN, OWN):
        # pydantic names the chosen algorithm in between.
        place, algorithm = (place[0], *place[2:]), place[1]
    if details["type"] == "extra_forbidden" and isinstance(details["input"], dict):
        leaves = list(islice(_leaves(details["input"], place), MAX_PROBLEMS + 1))
        if any(map(is_elsewhere, leaves)):
            return [_unknown(leaf, "setting", _source(leaf, sources)) for leaf in leaves]
    return [_problem(place, details, sources, algorithm)]


def _leaves(value: Any, place: Place) -> Iterator[Place]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*place, key))
    else:
        yield place


def _unknown(place: Place, what: str, source: str, algorithm: str = "") -> Problem:
    return Problem(".".join(place), f"is not a known {what}; {suggest(place, algorithm)}", source)


def _source(place: Place, sources: Mapping[Place, str]) -> str:
    """Return where a setting or section was set ("FILE line 12"). If unknown, return the origin of a setting within it,
    or else of its section."""
    if place in sources:
        return sources[place]
    if within := next((source for known, source in sources.items() if known[: len(place)] == place), ""):
        return within
    return next((sources[place[:n]] for n in range(len(place) - 1, 0, -1) if place[:n] in sources), "")


def _source_of_rule(message: str, place: Place, sources: Mapping[Place, str]) -> str:
    """Return where the first setting that a message names was set; if the message names none, where `place` was set."""
    # A list's entry, such as tracking.trackers.0, has the line of its list.
    named = (tuple(re.sub(r"\.\d+$", "", name).split(".")) for name in re.findall(r"\b[a-z_]+(?:\.\w+)+", message))
    return next((sources[one] for one in named if one in sources), _source(place, sources))


def _problem(place: Place, details: ErrorDetails, sources: Mapping[Place, str], algorithm: str) -> Problem:
    setting, kind = ".".join(place), details["type"]
    context, value = details.get("ctx", {}), details["input"]
    source = _source(place, sources)
    if kind == "extra_forbidden":
        return _unknown(place, "section" if isinstance(value, dict) else "setting", source, algorithm)
    if kind == "missing":
        meaning = settings()[place].meaning if place in settings() else sections().get(place, "it has no default")
        return Problem(setting, f"is missing: {meaning}", source if len(place) > 1 else "")
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        return Problem(setting, _not_allowed(value, choices), source)
    if kind == "union_tag_invalid":
        message = _not_allowed(value["name"], list(BUILT_IN), ', or "package.module:Class" for one of your own')
        return Problem(f"{setting}.name", message, _source((*place, "name"), sources))
    if kind == "value_error":
        # Our validators name the settings themselves.
        message = str(context["error"])
        return Problem("", message, _source_of_rule(message, place, sources))
    return Problem(setting, f"= {_show(value)}: {_requirement(kind, context, details['msg'], place, value)}", source)


def _not_allowed(value: Any, choices: Sequence[str], other: str = "") -> str:
    written = str(value).lower()[:MAX_SHOWN]
    close = difflib.get_close_matches(written, choices, n=3, cutoff=0.5)
    # Among equally close names, prefer the same letters: "gpro" is grpo rather than gspo.
    close.sort(key=lambda name: sorted(name) != sorted(written))
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"= {_show(value)} is not allowed: one of {', '.join(map(repr, choices))}{other}{hint}"


def _requirement(kind: str, context: Mapping[str, Any], message: str, place: Place, value: Any) -> str:
    if kind in ("tuple_type", "list_type"):
        return f"must be a list, such as [{_show(value)}]"
    if isinstance(value, list) and place == ("data", "path"):
        return "must be one path, in quotes; several files are a folder, or [[data.sources]] with a path each"
    bounds = {"greater_than": ("gt", "more than"), "greater_than_equal": ("ge", "at least")}
    bounds |= {"less_than": ("lt", "less than"), "less_than_equal": ("le", "at most")}
    if kind in bounds:
        key, words = bounds[kind]
        return f"must be {words} {context[key]}"
    types = {
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "bool_type": "must be true or false",
        "string_type": "must be a text, in quotes",
        "path_type": "must be a path, in quotes",
        "model_type": "must be a section: [name], then its settings",
        "union_tag_not_found": "must be a section: [name], then its settings",
        "model_attributes_type": "must be a section: [name], then its settings",
    }
    return types.get(kind, message)


def _show(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
