"""Prompts with pictures, which many groups share, and an auditor of what the run's step files have of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relaxd.data.vision import read_vision
from relaxd.media import ImageRule, MediaError, normalise_image
from relaxd.media.prompt_media import PromptMedia
from services.trainer.batch.step_file import read_step_file
from tests.kit.vision import encoded, picture

PICTURES = 6
MOST_DIFFERENCE = 1e-3
"""Of log-probs of engine and trainer, in float32, of tokens of the same weights. With another picture it is 1 or so."""


class Pictures:
    """A source of prompts, each with one or two of the pictures, whose numbers are its answer."""

    def __len__(self) -> int:
        return 10 * PICTURES

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row."""
        numbers = [index % PICTURES] if index % 3 else [index % PICTURES, 1]
        shown = [encoded(picture(64, 64, number)) for number in numbers]
        return {"prompt": "<image>" * len(numbers) + "What is here?", "answer": str(numbers), "images": shown}


def audit_pictures(run_folder: Path, model: Path) -> list[str]:
    """Say which groups were trained with other pictures than their prompts', and where engine and trainer differ."""
    rule = read_vision(model).rule
    hashes = [normalise_image(encoded(picture(64, 64, number)), rule).sha256 for number in range(PICTURES)]
    wrong, steps = [], sorted((run_folder / "steps").glob("step-*.safetensors"))
    for path in steps:
        names = ("prompt", "prompt_media", "media_contents")
        for group_id, columns in read_step_file(path, names=names).groups.items():
            due = [hashes[number] for number in json.loads(columns["prompt"]["answer"])]
            wrong += [f"{path.name}: group {group_id} {problem}" for problem in _otherwise(columns, due, rule)]
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    gaps = {line["step"]: line["logprob_difference_max"] for line in lines if "logprob_difference_max" in line}
    wrong += [f"step {step}: log-probs differ by {gap:.2g}" for step, gap in gaps.items() if gap > MOST_DIFFERENCE]
    if not gaps or not steps:
        wrong.append(f"{len(steps)} step files, {len(gaps)} differences of log-probs: there is nothing to audit")
    return wrong


def _otherwise(columns: dict[str, Any], due: list[str], rule: ImageRule) -> Iterator[str]:
    """Say what is otherwise with a group's media."""
    try:
        items = PromptMedia.of_columns(columns).items()
    except MediaError as error:
        yield str(error)
        return
    if [item.sha256 for item in items] != due:
        yield f"has {[item.sha256[:12] for item in items]}, not {[one[:12] for one in due]}"
    for item in items:
        if (found := normalise_image(item.content, rule).sha256) != item.sha256:
            yield f"has {found[:12]} under the name of {item.sha256[:12]}"
