"""Compares the vocabularies of two models."""

from pathlib import Path

from tokenizers import Tokenizer

from relaxd.config import RunConfig
from relaxd.models import DataError
from relaxd.models.folders import frozen_models, resolve_model
from relaxd.models.shape import decoder_config
from relaxd.text import parse_json

SHOWN = 3
"""Maximum number of differing tokens that an error names."""


def check_vocabularies(config: RunConfig, role: str) -> None:
    """Check that a role's frozen models have the trained model's vocabulary.

    Otherwise log-probs of the same token ids can't be compared. Reads the folders; downloads no weights.

    Raises:
        DataError: a vocabulary differs, or a model is missing.
    """
    trained = resolve_model(config.model.path, weights=False)
    folders = frozen_models(config, role, weights=False)
    for setting, model in config.roles.frozen[role].settings.items():
        if model and (problem := vocabulary_problem(trained, folders[model])):
            raise DataError(
                setting,
                f"= {model!r} has another vocabulary than model.path = {config.model.path!r}: {problem}. The {role} is "
                "asked for log-probs of the trained model's token ids: choose a model with the same tokenizer",
            )


def vocabulary_problem(one: Path, other: Path) -> str:
    """Describe the token ids that mean different tokens in two model folders; "" if there are none.

    Compares tokenizer.json, added tokens included. The sizes of the output layers may differ, because models pad them.
    The sizes are compared only if neither folder has a tokenizer.

    Raises:
        DataError: a tokenizer can't be read.
    """
    vocabularies = [_vocabulary(folder) for folder in (one, other)]
    if vocabularies[0] is None and vocabularies[1] is None:
        sizes = [vocab_size(folder) for folder in (one, other)]
        return "" if sizes[0] == sizes[1] else f"vocab_size is {sizes[1]}, not {sizes[0]}"
    for folder, vocabulary in zip((one, other), vocabularies, strict=True):
        if vocabulary is None:
            return f"{folder} has no tokenizer.json to compare"
    first, second = ({id: token for token, id in (found or {}).items()} for found in vocabularies)
    if first == second:
        return ""
    differing = [id for id in sorted(first.keys() | second.keys()) if first.get(id) != second.get(id)]
    shown = ", ".join(
        f"token {id} is {_named(second.get(id))} and not {_named(first.get(id))}" for id in differing[:SHOWN]
    )
    return f"{len(differing)} of {len(first)} tokens differ: {shown}"


def _vocabulary(folder: Path) -> dict[str, int] | None:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        vocabulary: dict[str, int] = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the Rust binding raises plain Exception
        raise DataError("model.path", f"{file} is not a tokenizer: {error}") from error
    return vocabulary


def vocab_size(folder: Path) -> int | None:
    """Return the size of a model's output layer, from its config.json; None if the file doesn't give it."""
    try:
        size: int = decoder_config(parse_json((folder / "config.json").read_text()))["vocab_size"]
    except (OSError, ValueError, KeyError):
        return None
    return size


def _named(token: str | None) -> str:
    return "missing" if token is None else repr(token)
