"""verl's settings of data and of evaluations."""

import re
from pathlib import PurePosixPath
from typing import Any

from relaxd.run_folder import HELD_OUT
from relaxd.tools.migrate.key_fates import Lost, Reader, listed
from relaxd.tools.migrate.verl_training import Conversion, converted, off

_PLAIN = ("test", "val", "valid", "validation", "dev", "eval", "train")
"""File names that say nothing without their folder."""


def complete_data(reader: Reader) -> None:
    """Add notes on paths that aren't resolved; change no settings."""
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
    """Write eval.sets: a set for each file."""
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
    """Return the sampling of a set; empty for a single greedy answer."""
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
    """Return a name for each set: its file's, with the folder if the file's name alone means nothing."""
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
"""verl options that need conversion, not only renaming."""
