"""`relaxd bundle`: an archive of a run's step for a colleague or a bug report, without secrets."""

import io
import json
import os
import platform
import re
import tarfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer

from relaxd.alerts.notifications import VARIABLE as ALERT_URLS
from relaxd.cli.options import FolderOption, RunNameArgument
from relaxd.cli.output import show
from relaxd.cli.run_checkpoints import CONTENTS, MODEL, Bundle, config_of, run_folder, steps_done
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.models import DataError
from relaxd.models.folders import resolve_model
from relaxd.rpc.service_settings import SECRET_FILES
from relaxd.run_folder import (
    CHECKPOINT_STATE,
    CODE,
    CONFIG,
    GROUPS,
    LEDGER,
    LOGS,
    METRICS,
    RECORD,
    SAMPLES,
    checkpoint_path,
    checkpoint_steps,
    parse_line,
    read_lines,
    step_files,
)
from relaxd.text import byte_amount
from relaxd.trackers.tracker import REDACTED, SECRET, VARIABLE, redact

VERSIONS = "versions.json"
"""Name of a bundle's file with the versions of the installed packages."""
OF_STEP = (LEDGER, GROUPS, SAMPLES)
"""Names of the files of which a bundle has only its step's lines, or with weights those since the checkpoint."""
LOG_LINES = 1000
"""Default number of lines to pack from the end of each log."""
MIN_SECRET = 5
"""Minimum length of a secret to search for, in characters; shorter ones may occur in ordinary words."""

USER = re.compile(r"(?<=\w://)[^\s/@\"']+@")
"""Matches user and password, or a token, in an address."""


def bundle(
    run_id: RunNameArgument,
    step: Annotated[int, typer.Option(min=1, help="Step that the bundle is about.")],
    weights: Annotated[
        bool, typer.Option("--weights", help="Add the model and the checkpoint before the step, to repeat the step.")
    ] = False,
    log_lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log.")] = LOG_LINES,
    out: Annotated[Path | None, typer.Option(help="File to write; default: RUN-step-N.tar.gz.")] = None,
    folder: FolderOption = None,
) -> None:
    """Pack a step of a run into one archive, for a colleague or a bug report, without secrets.

    It has configuration, versions, the step's file, its lines of the ledger, groups and samples, all metrics, and the
    logs' ends. relaxd replay BUNDLE repeats the step on another machine, if it has the weights (--weights).
    """
    found = run_folder(run_id, folder)
    if step > (done := steps_done(found)):
        raise CliError(f"run {run_id} has done {done} steps: there is no step {step} to pack")
    target = out or Path(f"{found.name}-step-{step}.tar.gz")
    if target.exists():
        raise CliError(f"{target} exists", "choose another file with --out")
    config = config_of(found)
    start = max((one for one in checkpoint_steps(found) if one < step), default=0) if weights else None
    files = _step_files(found, step, start)
    secrets = find_secrets(config, os.environ)
    checkpoint = [checkpoint_path(found, start)] if start else []
    for path in (*files, *(folder / CHECKPOINT_STATE for folder in checkpoint)):
        refuse_secrets(path, secrets)
    partial = target.with_name(f"{target.name}.partial")
    try:
        with tarfile.open(partial, "w:gz", compresslevel=1, dereference=True) as archive:
            for name, text in _texts(found, config, Bundle(found.name, step, start), log_lines).items():
                _add_text(archive, name, without_secrets(text, secrets))
            for path in (*files, *checkpoint):
                archive.add(path, str(path.relative_to(found)))
            if weights:
                archive.add(resolve_model(config.model.path), MODEL)
        partial.replace(target)
    except (OSError, DataError) as error:
        raise CliError(f"{target} can't be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    rest = "relaxd replay repeats the step from it" if weights else "no weights: --weights adds them"
    show(f"{target} ({byte_amount(target.stat().st_size)}; {rest})")


def _step_files(folder: Path, step: int, start: int | None) -> list[Path]:
    """Return the file of a step, or with `start` those of all steps from `start` + 1 to `step`.

    Raises CliError: a file is missing.
    """
    files, wanted = step_files(folder), range(step if start is None else start + 1, step + 1)
    if missing := next((number for number in wanted if number not in files), None):
        raise CliError(
            f"{folder} has no file of step {missing}: it was removed once checkpoints covered it",
            'trainer.checkpoint.keep_step_files = "always" keeps the files of all steps',
        )
    return [files[number] for number in wanted]


def _texts(folder: Path, config: RunConfig, facts: Bundle, log_lines: int) -> dict[str, str]:
    """Return the text files of a bundle by name, secrets included."""
    texts = {
        CONTENTS: json.dumps(asdict(facts)),
        CONFIG: json.dumps(redact(config.model_dump(mode="json")), indent=2),
        VERSIONS: json.dumps(_versions(), indent=2),
    }
    for name in (CODE, RECORD, METRICS):
        if (folder / name).is_file():
            texts[name] = (folder / name).read_text(encoding="utf-8", errors="replace")
    if record := parse_line(texts.get(RECORD, "")):
        texts[RECORD] = json.dumps({name: value for name, value in record.items() if name != "config_json"}, indent=2)
    steps = range(facts.step if facts.start is None else facts.start + 1, facts.step + 1)
    for name in OF_STEP:
        lines = (line for line in read_lines(folder / name) if line.get("step") in steps)
        texts[name] = "".join(json.dumps(line) + "\n" for line in lines)
    for path in sorted((folder / LOGS).glob("*.log")) if log_lines else ():
        with path.open(encoding="utf-8", errors="replace") as file:
            texts[f"{LOGS}/{path.name}"] = "".join(deque(file, log_lines))
    return texts


def _versions() -> dict[str, Any]:
    packages = {one.metadata["Name"]: one.version for one in distributions()}
    return {"python": platform.python_version(), "platform": platform.platform(), "packages": packages}


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


# --- secrets ----------------------------------------------------------------------------------------------------------


def find_secrets(config: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return all secrets of the configuration, environment variables and secret files, each with where it was found."""
    found: dict[str, str] = {}
    variables = {name: value for name, value in environment.items() if value}
    of_files = {*(f"RELAXD_{name.upper()}" for name in SECRET_FILES), "alerts.urls_file"}
    for place, value in (*_leaves(config.model_dump(mode="json")), *variables.items()):
        name = place.rpartition(".")[2]
        if place in of_files or (place.endswith("_FILE") and SECRET.search(place.removesuffix("_FILE"))):
            found |= dict.fromkeys(_words_of(Path(value)), place)
        elif place == ALERT_URLS:
            found |= dict.fromkeys(value.split(), place)
        elif VARIABLE.search(name):
            found[environment.get(value, "")] = value
        elif SECRET.search(name):
            found[value] = place
        if "://" in value and (secret := _secret_of(value)):
            found |= {secret: place, unquote(secret): place}
    return {value: place for value, place in found.items() if len(value) >= MIN_SECRET}


def without_secrets(text: str, secrets: Mapping[str, str]) -> str:
    """Return a text with *** for each secret, plain or JSON-escaped, and for user and password in each address."""
    for secret in sorted(secrets, key=len, reverse=True):  # one may begin with another
        text = text.replace(secret, REDACTED).replace(json.dumps(secret)[1:-1], REDACTED)
    return USER.sub(f"{REDACTED}@", text)


def refuse_secrets(path: Path, secrets: Mapping[str, str]) -> None:
    """Raise CliError if a file that must be packed unchanged, such as a step's file, contains a secret."""
    with path.open("rb") as file:
        tail = b""
        while block := file.read(1 << 24):
            for secret, place in secrets.items():
                if secret.encode() in tail + block:
                    raise CliError(
                        f"{path} has the value of {place}, which is a secret, so it can't be packed: a prompt, an "
                        "answer or a setting has it"
                    )
            tail = block[-max(map(len, secrets), default=1) * 4 :]


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value of each setting that is a text and not empty."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, place)
    elif isinstance(value, str) and value:
        yield place, value


def _secret_of(address: str) -> str:
    """Return the password in an address, else its user, which may be a token; "" if the address has neither."""
    try:
        parts = urlsplit(address)
        return parts.password or parts.username or ""
    except ValueError:
        return ""


def _words_of(path: Path) -> list[str]:
    """Return the words of a file with secrets; an empty list if the file can't be read."""
    try:
        return path.read_text(encoding="utf-8").split() if path.is_file() else []
    except (OSError, UnicodeDecodeError):
        return []
