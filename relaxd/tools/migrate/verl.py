"""Reads verl's configurations (hydra YAML, scripts and command lines with dotted overrides) and converts them to
relaxd's settings. The conversions of data and evaluations are here, those of training and of rewards in separate files.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from relaxd.config.load_toml import ConfigError, load
from relaxd.config.other_frameworks import EQUIVALENTS, Equivalent
from relaxd.config.settings_table import settings
from relaxd.run_folder import HELD_OUT
from relaxd.tools.migrate.key_fates import ACTOR, Lost, Migrated, Reader, is_off, listed, reason
from relaxd.tools.migrate.verl_rewards import REWARDS, REWARDS_BY_PATTERN, add_tools, complete_rewards
from relaxd.tools.migrate.verl_training import TRAINING, Conversion, algorithm_of, complete_training, converted, off

_PLAIN = ("test", "val", "valid", "validation", "dev", "eval", "train")
"""Data file names, such as "test", that don't identify an evaluation set without the folder's name."""


def complete_data(reader: Reader) -> None:
    """Add notes on data paths that contain variables or ~, which the migration doesn't resolve."""
    paths = [*listed(reader.get("data.train_files")), *listed(reader.get("data.val_files"))]
    for mark, why in (("$", "has variables, which are not resolved"), ("~", "begins with ~, which is not resolved")):
        if found := next((path for path in paths if (mark in path if mark == "$" else path.startswith(mark))), None):
            reader.note(f"data.path, eval.sets: {found} {why}")


def _train(reader: Reader, value: Any) -> None:
    files, most = listed(reader.get("data.train_files")), int(reader.get("data.train_max_samples", -1))
    if len(files) == 1:
        reader.set("data.path", f"{files[0]}@[0:{most}]" if most > 0 else files[0])
        if most > 0 and reader.get("data.shuffle", True):
            reader.note(f"data.path: the first {most} rows; verl takes {most} at random")
    elif files:
        reader.set("data.sources", [{"name": f"files{n}", "path": path} for n, path in enumerate(files, 1)])


def _train_most(reader: Reader, value: Any) -> None:
    if int(value) <= 0:
        return
    if len(listed(reader.get("data.train_files"))) != 1:
        raise Lost('a part of a file is "PATH@[0:100]", for each of data.sources')
    _train(reader, value)


def _sets(reader: Reader, value: Any) -> None:
    """Convert verl's validation files and their sampling to eval.sets, with a set for each file."""
    files = listed(reader.get("data.val_files"))
    if not files:
        if reader.key != "data.val_files":
            raise Lost("there is nothing to evaluate on: data.val_files is missing")
        return
    own = _sampling(reader)
    most = int(reader.get("data.val_max_samples", -1))
    if most > 0:
        own["prompts"] = most
        if len(files) > 1:
            reader.note(f"eval.sets: prompts = {most} is of each set; verl counts all files together")
    names = _names(files)
    reader.set("eval.sets", [{"name": name, "path": path} | own for name, path in zip(names, files, strict=True)])


def _sampling(reader: Reader) -> dict[str, Any]:
    """Return the sampling settings of an evaluation set; {} for one greedy answer per prompt."""
    n = int(reader.get("rollout.val_kwargs.n", 1))
    temperature = float(reader.get("rollout.val_kwargs.temperature", 0))
    if temperature <= 0:
        if n > 1:
            reader.note(f"eval.sets: verl gives {n} answers at temperature 0, which are all the same; here is one")
        return {}
    if not reader.get("rollout.val_kwargs.do_sample"):
        reader.note(
            f"eval.sets: sampled at temperature {temperature:g}, though val_kwargs.do_sample is off: newer versions of "
            "verl ignore that, older ones answer greedily"
        )
    found: dict[str, Any] = {"samples_per_prompt": n} if n > 1 else {}
    found |= {"temperature": temperature, "top_p": float(reader.get("rollout.val_kwargs.top_p", 1.0))}
    return found | {"top_k": max(0, int(reader.get("rollout.val_kwargs.top_k", -1)))}


def _names(files: list[str]) -> list[str]:
    """Return a unique name for each file's evaluation set: the file's name, preceded by the folder's if the file's is
    generic or occurs twice."""
    names: list[str] = []
    stems = [PurePosixPath(file).stem for file in files]
    for file, stem in zip(files, stems, strict=True):
        folder = PurePosixPath(file).parent.name
        name = f"{folder}-{stem}" if folder and (stem.lower() in _PLAIN or stems.count(stem) > 1) else stem
        name = re.sub(r"[^a-z0-9_.-]+", "-", name.lower()).strip("-_.")[:60] or "set"
        taken = {HELD_OUT, *names}
        names.append(next(one for one in (name, *(f"{name}-{n}" for n in range(2, 1000))) if one not in taken))
    return names


def _truncation(reader: Reader, value: Any) -> None:
    if value != "error":
        raise Lost("relaxd never cuts a prompt: data.overlong says what becomes of long ones")


DATA: dict[str, Conversion] = {
    "data.train_files": _train,
    "data.train_max_samples": _train_most,
    "data.val_files": _sets,
    "data.val_max_samples": _sets,
    "rollout.val_kwargs.n": _sets,
    "rollout.val_kwargs.temperature": _sets,
    "rollout.val_kwargs.top_p": _sets,
    "rollout.val_kwargs.top_k": _sets,
    "rollout.val_kwargs.do_sample": _sets,
    "data.validation_shuffle": off("evaluations take the first prompts of a set"),
    "data.filter_overlong_prompts": converted("data.overlong", lambda skips: "skip" if skips else "error"),
    "data.truncation": _truncation,
    "data.custom_cls.path": off("a data set's class is written anew: a class of rows (docs/data.md)"),
    "data.custom_cls.name": off("a data set's class is written anew: a class of rows (docs/data.md)"),
    "data.sampler.class_path": off("a sampler is written anew: it has choose(visit, record) (docs/curriculum.md)"),
    "data.sampler.class_name": off("a sampler is written anew: it has choose(visit, record) (docs/curriculum.md)"),
}
"""verl's keys of data and evaluations whose values must be converted, not only renamed, with the conversions."""


_NAMES: dict[str, Equivalent] = {name: one for one in reversed(EQUIVALENTS) for name in one.names["verl"]}
_CONVERSIONS = TRAINING | DATA | REWARDS
"""Conversions of all verl's keys that need more than renaming, by the key's name without "actor_rollout_ref."."""
_TABLES = {
    "rollout.engine_kwargs.sglang": "rollout.sglang",
    "data.apply_chat_template_kwargs": "model.chat_template_arguments",
}
"""verl's tables that relaxd has with the same keys, and relaxd's names of the tables. Scripts set the keys one by
one."""


def migrate(given: Mapping[str, Any]) -> Migrated:
    """Convert verl's settings, given by dotted name, to a configuration of relaxd."""
    reader = Reader(given)
    reader.set("algorithm.name", algorithm_of(reader))
    reader.set("data.source", "files")
    reader.set("data.answer_key", "reward_model.ground_truth")
    for name, value in given.items():
        reader.begin(name)
        try:
            _convert(reader, name, value)
        except Lost as why:
            reader.lose(str(why))
        except (TypeError, ValueError, ZeroDivisionError):
            reader.lose("it isn't the number that is needed: variables are not resolved")
        else:
            reader.end()
    reader.begin("")
    complete_training(reader)
    complete_data(reader)
    complete_rewards(reader)
    add_tools(reader)
    try:
        load(reader.out.to_toml())
    except ConfigError as error:
        reader.out.problems = [str(problem) for problem in error.problems]
    return reader.out


def _convert(reader: Reader, name: str, value: Any) -> None:
    short = name.removeprefix(ACTOR)
    if is_off(reader, short):
        return
    if short in _CONVERSIONS:
        _CONVERSIONS[short](reader, value)
        return
    for pattern, convert in REWARDS_BY_PATTERN:
        if match := re.fullmatch(pattern, short):
            convert(reader, value, match[match.lastindex or 0])
            return
    for table, setting in _TABLES.items():
        if short == table or short.startswith(f"{table}."):
            _into_table(reader, setting, short.removeprefix(table).removeprefix("."), value)
            return
    equivalent = _NAMES.get(name)
    if (value is None or value in ("", "null", [], {})) and not name.startswith("~"):
        return  # verl's default, which is off
    if equivalent is None or not equivalent.setting:
        raise Lost((equivalent.note if equivalent else "") or reason(short))
    place = tuple(equivalent.setting.split("."))
    if place not in settings(reader.out.values["algorithm.name"]):
        raise Lost(f"{equivalent.setting} is not a setting of algorithm.name = {reader.out.values['algorithm.name']!r}")
    if isinstance(value, str) and "$" in value:
        reader.note(f"{equivalent.setting}: {value} has variables, which are not resolved")
    reader.set(equivalent.setting, value)


def _into_table(reader: Reader, setting: str, key: str, value: Any) -> None:
    """Copy a key of a verl table, or all its keys if `key` is "", into a setting of relaxd that is a table."""
    found = {key: value} if key else dict(value or {})
    if given := {name: one for name, one in found.items() if one is not None}:
        reader.out.values[setting] = reader.out.values.get(setting, {}) | given
        reader.set(setting, reader.out.values[setting])


OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w-]*(?:[.@/][\w@/-]+)+|model_engine)=(.*)", re.DOTALL)
"""Pattern of a hydra override, such as data.train_batch_size=8. A script's other assignments are shell variables, whose
names have no dots."""
_OTHERS = re.compile(r"(~[A-Za-z_][\w.@/-]*|--config-(?:name|path|dir))(?:=(.*))?", re.DOTALL)
"""Pattern of other arguments that hydra accepts: deletions of keys (~KEY), and options that name configuration
files."""
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)(?:,\s*([^{}]*?)\s*)?\}")
"""Pattern of an interpolation, such as ${data.train_batch_size}, with an optional default."""


class VerlConfigError(ValueError):
    """A verl configuration can't be read; the message says why."""


def read_verl(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a verl configuration, and return its settings by dotted name.

    `path` is a YAML file, or a script that calls verl with overrides; `overrides` are words such as
    "actor_rollout_ref.rollout.n=8", which replace settings of the file. Interpolations (${...}) of other keys are
    resolved, variables of a script aren't. Raises VerlConfigError.
    """
    try:
        import yaml
    except ImportError as error:
        raise VerlConfigError(f"{error}: pip install 'relaxd[migrate]'") from error
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerlConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        if path.suffix in (".yaml", ".yml"):
            tree = yaml.safe_load(text)
            if not isinstance(tree, dict):
                raise VerlConfigError(f"{path} holds a {type(tree).__name__}: it must be a mapping of sections")
            found = dict(_leaves(tree))
        else:
            words = shlex.split(text, comments=True)
            found = _assignments(words, yaml.safe_load)
            if not found:
                raise VerlConfigError(f"{path} has no override such as actor_rollout_ref.rollout.n=8, and isn't YAML")
            found |= _others(words)
        given = _assignments(overrides, yaml.safe_load)
    except RecursionError:
        raise VerlConfigError(f"{path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise error if isinstance(error, VerlConfigError) else VerlConfigError(f"{path}: {error}") from error
    if len(given) != len(overrides):
        wrong = next(word for word in overrides if not OVERRIDE.fullmatch(word))
        raise VerlConfigError(f"{wrong!r} is no override of verl: write it as actor_rollout_ref.rollout.n=8")
    found |= given
    return {name: _number(_resolved(value, found, yaml.safe_load)) for name, value in found.items()}


def _assignments(words: Sequence[str], parse: Any) -> dict[str, Any]:
    matches = [OVERRIDE.fullmatch(word.strip()) for word in words]
    return {match[1]: parse(match[2]) if match[2] else "" for match in matches if match}


def _others(words: Sequence[str]) -> dict[str, Any]:
    """Return a script's hydra arguments that aren't overrides, by name; the migration reports that they have no
    equivalent."""
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if match := _OTHERS.fullmatch(word.strip()):
            separate = "" if match[1].startswith("~") else following
            found[match[1]] = separate if match[2] is None else match[2]
    return found


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and not name.endswith("reward_kwargs"):
            yield from _leaves(value, f"{name}.")
        elif name != "defaults" or value not in (["_self_"], ["ppo_trainer", "_self_"]):  # files that hydra adds
            yield name, value


def _resolved(value: Any, found: Mapping[str, Any], parse: Any, depth: int = 0) -> Any:
    """Replace interpolations such as ${data.train_batch_size} in a setting's value by the values of those settings."""
    if not isinstance(value, str) or depth > 10:
        return value

    def one(match: re.Match[str]) -> Any:
        if match[1] in found:
            return _resolved(found[match[1]], found, parse, depth + 1)
        return match[0] if match[2] is None else parse(match[2])

    if match := _REFERENCE.fullmatch(value):
        return one(match)
    return _REFERENCE.sub(lambda match: str(one(match)), value)


def _number(value: Any) -> Any:
    """Convert a text such as "1e-6" to a float, because PyYAML (YAML 1.1) reads such numbers as text; return other
    values unchanged."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value
