"""IFEval's reward: verifiable instructions (Zhou et al. 2023, arXiv 2311.07911), checked by if-verifiable."""

from collections.abc import Mapping
from typing import Any

from relaxd.rewards.base import RewardInput
from relaxd.rewards.limit import TooSlow, time_limit

CHECK_SECONDS = 3.0
"""Time for checking one reply. Then it fails."""


def ifeval(sample: RewardInput) -> dict[str, float]:
    """1 if the reply follows all of its prompt's instructions, to the letter, else 0.

    Metadata: instruction_id_list, and kwargs: an object for each instruction, whose null values are left out. Parts:
    accuracy (the same), followed: share of instructions followed, and loose: 1 if all hold for the reply without its
    first or last line, or without asterisks. Needs the package if-verifiable. Counts of sentences and of words in
    capitals also need nltk's data (nltk.download("punkt"), "punkt_tab").

    Raises:
        ValueError: the metadata lack instructions, or have some that IFEval doesn't know.
    """
    from if_verifiable.common import evaluate_instructions
    from if_verifiable.ifeval import INSTRUCTION_DICT

    names, arguments = _instructions(sample.metadata, INSTRUCTION_DICT)
    prompt = str(sample.metadata.get("prompt_text") or sample.prompt)
    try:
        with time_limit(CHECK_SECONDS):
            _, scores = evaluate_instructions(sample.response, names, arguments, prompt, INSTRUCTION_DICT)
    except TooSlow:
        return {"reward": 0.0, "accuracy": 0.0, "followed": 0.0, "loose": 0.0}
    return {
        "reward": scores.binary_strict,
        "accuracy": scores.binary_strict,
        "followed": scores.partial_strict,
        "loose": scores.binary_loose,
    }


def _instructions(metadata: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    names = metadata.get("instruction_id_list")
    if not isinstance(names, list) or not names:
        raise ValueError(f"metadata.instruction_id_list is {names!r}: the reward ifeval needs a list of instructions")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"metadata.instruction_id_list has {', '.join(map(repr, unknown))}, which IFEval doesn't know")
    arguments = metadata.get("kwargs") or [{}] * len(names)
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError(f"metadata.kwargs must be a list of {len(names)} objects, one for each instruction")
    return names, [{name: value for name, value in (one or {}).items() if value is not None} for one in arguments]
