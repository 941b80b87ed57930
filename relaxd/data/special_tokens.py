"""Reading of the special tokens, such as the end token, from the files of a model's tokenizer."""

import json
from pathlib import Path
from typing import Any

from relaxd.models import DataError
from relaxd.text import parse_json

TOKENIZER_CONFIG, TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of the special tokens that chat templates can use as variables."""


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the special tokens of a model's folder, by name, as transformers finds them.

    In folders of older versions, whose tokenizer_config.json has no added_tokens_decoder, special_tokens_map.json wins.
    Raises DataError if a file is damaged.
    """
    files = [folder / TOKENIZER_CONFIG]
    if "added_tokens_decoder" not in read_object(files[0]):
        files.append(folder / TOKENS_MAP)
    found: dict[str, str | None] = {}
    for file in files:
        values = read_object(file)
        found |= {name: token_text(file, name, values[name]) for name in SPECIAL_TOKENS if name in values}
    return {name: token for name, token in found.items() if token is not None}


def token_text(file: Path, name: str, value: Any) -> str | None:
    """Return the text of a special token from its entry in a file; None if it isn't set. Raises DataError if the entry
    has a wrong type."""
    text = value.get("content") if isinstance(value, dict) else value
    if value is not None and not isinstance(text, str):
        raise DataError(
            "model.path",
            f'{file} is damaged: {name} is {json.dumps(value)[:80]}, but must be text, an object {{"content": text}} '
            "or null",
        )
    return text


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is no such file. Raises DataError if the file has anything else."""
    try:
        value = parse_json(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise DataError("model.path", f"{file} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError("model.path", f"{file} is damaged: it has {json.dumps(value)[:80]} instead of a JSON object")
    return value
