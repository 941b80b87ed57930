"""SQuAD's F1 over shared words (Rajpurkar et al. 2016, arXiv 1606.05250)."""

import re
import string
from collections import Counter

from relaxd.rewards.interface import RewardInput, best_of_references

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@best_of_references
def f1(sample: RewardInput) -> dict[str, float]:
    """Harmonic mean of precision and recall over words, ignoring case, punctuation and articles.

    Parts: precision, recall. If reply or answer is "yes", "no" or "noanswer", only equality counts. With several
    references the best result counts.

    Raises:
        ValueError: the answer has no words.
    """
    answer, response = words(sample.answer), words(sample.response)
    if not answer:
        raise ValueError(f"answer is {sample.answer!r}: the reward f1 needs words to compare with")
    closed = (["yes"], ["no"], ["noanswer"])
    shared = (Counter(answer) & Counter(response)).total()
    if shared == 0 or (answer != response and (answer in closed or response in closed)):
        return {"reward": 0.0, "precision": 0.0, "recall": 0.0}
    precision, recall = shared / len(response), shared / len(answer)
    return {"reward": 2 * precision * recall / (precision + recall), "precision": precision, "recall": recall}


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
