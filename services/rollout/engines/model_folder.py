"""Configuration and tokenizer of a model folder, read without torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from relaxd.data.special_tokens import TOKENIZER_CONFIG, TOKENS_MAP, read_object, token_text
from relaxd.models import DataError


@dataclass(frozen=True)
class ModelFolder:
    """Facts about a model folder that an engine needs: the model's limits, and its tokenizer."""

    vocabulary: int
    """Number of token ids in the model's vocabulary; every token id is smaller."""
    context: int
    """Maximum number of tokens of prompt and answer together; 0 if the model's files name no limit."""
    architectures: tuple[str, ...]
    """Names of the model's classes in transformers."""
    end_ids: tuple[int, ...]
    """Ids of the tokens that end an answer."""
    tokenizer: Tokenizer


def read_model_folder(folder: Path) -> ModelFolder:
    """Read config.json and tokenizer.json, and generation_config.json and the special-token files if they exist.

    Raises DataError when a file is missing or broken.
    """
    config = _json(folder / "config.json")
    thinker = config.get("thinker_config") or config
    text_config = thinker.get("text_config") or thinker
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the Rust binding raises plain Exception
        raise DataError("model.path", f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
    generation = folder / "generation_config.json"
    configured = (_json(generation) if generation.is_file() else text_config).get("eos_token_id")
    end_ids = set(configured if isinstance(configured, list) else [configured])
    # Folders from older versions of transformers name the end token only in special_tokens_map.json.
    files = [folder / TOKENIZER_CONFIG, folder / TOKENS_MAP]
    named = (token_text(file, "eos_token", read_object(file).get("eos_token")) for file in files)
    if eos_text := next((text for text in named if text), None):
        end_ids.add(tokenizer.token_to_id(eos_text))
    if not isinstance(text_config.get("vocab_size"), int):
        raise DataError("model.path", f"{folder / 'config.json'} has no vocab_size")
    return ModelFolder(
        vocabulary=text_config["vocab_size"],
        context=text_config.get("max_position_embeddings") or 0,
        architectures=tuple(config.get("architectures") or ()),
        end_ids=tuple(sorted(end_ids - {None})),
        tokenizer=tokenizer,
    )


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError("model.path", f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise DataError("model.path", f"{file} is not a JSON object")
    return value
