"""Rewards of verifiable instructions, checked by if-verifiable.

IFEval: Zhou et al. 2023, arXiv 2311.07911. IFBench: Pyatkin et al. 2025, arXiv 2507.02833.
"""

import csv
from collections.abc import Mapping
from typing import Any

from relaxd.rewards.hub.ifbench_checkers import ifbench_checkers
from relaxd.rewards.interface import RewardInput, TooSlow, time_limit

CHECK_SECONDS = 3.0
"""Maximum seconds for checking one reply, which then fails."""
_BY_REPLY = (IndexError, csv.Error, RecursionError)
"""Errors that checkers raise at odd replies, such as one of digits only. Such a reply follows nothing. nltk's
LookupError, for data that isn't installed, is none of these."""


def ifeval(sample: RewardInput) -> dict[str, float]:
    """1 if the reply follows all of its prompt's instructions, to the letter, else 0.

    Metadata: instruction_id_list, and kwargs: an object for each instruction, whose null values are left out. Parts:
    accuracy (the same), followed: share of instructions followed, and loose: 1 if all hold for the reply without its
    first or last line, or without asterisks. Needs the package if-verifiable. Counts of sentences and of words in
    capitals also need nltk's data (nltk.download("punkt"), "punkt_tab").

    Raises:
        ValueError: the metadata lack instructions, or have some that IFEval doesn't know.
    """
    from if_verifiable.ifeval import INSTRUCTION_DICT
    from langdetect import DetectorFactory, detector_factory

    DetectorFactory.seed = 0  # by default a short reply is English in one call and not in the next
    detector_factory.init_factory()  # once in a process, for longer than a check: not within its time
    return _followed(sample, "ifeval", INSTRUCTION_DICT)


def ifbench(sample: RewardInput) -> dict[str, float]:
    """1 if the reply follows all of its prompt's instructions of IFBench, to the letter, else 0.

    Metadata, parts and package as `ifeval`; nltk's data are also "stopwords" and "averaged_perceptron_tagger_eng".

    Raises:
        ValueError: the metadata lack instructions, or have some that IFBench doesn't know.
        LookupError: an instruction needs data of nltk that isn't installed.
    """
    return _followed(sample, "ifbench", ifbench_checkers())


def _followed(sample: RewardInput, name: str, known: Mapping[str, Any]) -> dict[str, float]:
    from if_verifiable.common import evaluate_instructions

    names, arguments = _instructions(sample.metadata, name, known)
    prompt = str(sample.metadata.get("prompt_text") or sample.prompt)
    try:
        with time_limit(CHECK_SECONDS):
            _, scores = evaluate_instructions(sample.response, names, arguments, prompt, known)
    except (TooSlow, *_BY_REPLY):
        return {"reward": 0.0, "accuracy": 0.0, "followed": 0.0, "loose": 0.0}
    return {
        "reward": scores.binary_strict,
        "accuracy": scores.binary_strict,
        "followed": scores.partial_strict,
        "loose": scores.binary_loose,
    }


def _instructions(
    metadata: Mapping[str, Any], reward: str, known: Mapping[str, Any]
) -> tuple[list[str], list[dict[str, Any]]]:
    names = metadata.get("instruction_id_list")
    if not isinstance(names, list) or not names:
        raise ValueError(f"metadata.instruction_id_list is {names!r}: the reward {reward} needs a list of instructions")
    if unknown := [name for name in names if name not in known]:
        named = ", ".join(map(repr, unknown))
        raise ValueError(f"metadata.instruction_id_list has {named}, which {reward} doesn't know")
    arguments = metadata.get("kwargs") or [{}] * len(names)
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError(f"metadata.kwargs must be a list of {len(names)} objects, one for each instruction")
    return names, [{name: value for name, value in (one or {}).items() if value is not None} for one in arguments]
