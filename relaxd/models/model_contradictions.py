"""Contradictions within a model's folder, which its readers would resolve differently."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relaxd.text import parse_json

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
PLACES = 16
"""Number of evenly spread places at which the bytes of two tensors are compared. Copies are equal at all places."""
COMPARED_BYTES = 1 << 16
"""Number of bytes of two tensors that are compared at each place."""
Tensor = tuple[Path, int, int]
"""Place of a tensor: its file, and the offsets in bytes of its beginning and end."""


def config_contradiction(config: Mapping[str, Any]) -> str:
    """Describe a contradiction within a model's config.json, and how to resolve it; "" if there is none."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if isinstance(new, dict) and isinstance(old, dict) and not old.items() <= new.items():
        return (
            f"rope_parameters is {json.dumps(new)} and rope_scaling is {json.dumps(old)}: engines and the trainer "
            "would rotate differently; keep rope_parameters, which newer releases read, or rope_scaling"
        )
    return ""


def weights_contradiction(folder: Path, tied_embeddings: bool) -> str:
    """Describe a contradiction between a model's config.json and its weights, and how to resolve it; "" without one.

    Missing weights, as before a download, are no contradiction.

    Args:
        folder: a Hugging Face model folder. Its files of weights are opened.
        tied_embeddings: `tie_word_embeddings` of its config.json.
    """
    if tied_embeddings and _has_its_own_head(folder):
        return (
            f"{folder / 'config.json'}: tie_word_embeddings is true, but the weights have an lm_head.weight other than "
            "the embedding: set it to false if the model was trained with a head, or remove lm_head.weight"
        )
    return ""


def _has_its_own_head(folder: Path) -> bool:
    """Return True if the weights have an output layer that differs from the embedding."""
    try:
        found = _tensors(folder)
        head = next((place for name, place in found.items() if name.endswith(HEAD)), None)
        embedding = next((place for name, place in found.items() if name.endswith(EMBEDDING)), None)
        return head is not None and embedding is not None and not _equal(head, embedding)
    except (OSError, ValueError, KeyError, TypeError):
        return False  # loading the model reports the problem


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return the places of the embedding and the output layer in a folder's safetensors files, by tensor name."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = parse_json(index.read_text())["weight_map"]
        files = {file for name, file in weight_map.items() if name.endswith((EMBEDDING, HEAD))}
    else:
        files = {file.name for file in folder.glob("*.safetensors")}
    found: dict[str, Tensor] = {}
    for name in sorted(files):
        path = folder / name
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length))
        for tensor, entry in header.items():
            if tensor.endswith((EMBEDDING, HEAD)):
                begin, end = entry["data_offsets"]
                found[tensor] = (path, 8 + length + begin, 8 + length + end)
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    (path, begin, end), (other_path, other_begin, other_end) = one, other
    if end - begin != other_end - other_begin:
        return False
    step = max(COMPARED_BYTES, (end - begin) // PLACES)
    with path.open("rb") as file, other_path.open("rb") as other_file:
        for offset in range(0, end - begin, step):
            size = min(COMPARED_BYTES, end - begin - offset)
            file.seek(begin + offset)
            other_file.seek(other_begin + offset)
            if file.read(size) != other_file.read(size):
                return False
    return True
