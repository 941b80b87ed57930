"""The reward for which the judge compares the answers of a group."""

import asyncio
from collections.abc import Sequence

from relaxd.rewards.interface import RewardInput
from relaxd.rewards.judge import ask
from relaxd.rewards.judge.single import GIVEN, REFERENCE, TASK, conversation, fill, read_side, visible

_PAIR = "\n<answer_A>\n{first}\n</answer_A>\n\n<answer_B>\n{second}\n</answer_B>\n"
_TOLD = (
    'Explain in one or two sentences. Then end with a line "Verdict: A", "Verdict: B", or "Verdict: tie" if they are '
    "equally good."
)
_OF_FIRST = {"A": 1.0, "B": 0.0, "TIE": 0.5}


async def judge_pairs(
    samples: Sequence[RewardInput],
    template: str = "",
    system: str = "",
    opponents: int = 0,
    retries: int = 2,
    thinking: bool = False,
) -> list[dict[str, float]]:
    """Share of the other replies to the prompt that the run's judge (roles.judge) finds worse; a tie counts half.

    Each pair of replies is compared in both orders, because judges prefer a position; equal replies tie without a
    question. Settings: template: the question, with {first} and {second}, and {prompt}, {answer} and {metadata.KEY} as
    needed, to which the judge says A, B or tie; system: a system message before it; opponents: number of next replies,
    in a circle, with which each reply is compared (0: all); retries: maximum number of further requests if the judge's
    reply can't be parsed; thinking = true: the judge also sees the thinking. Part: consistent: share of a reply's
    comparisons whose two orders agree. A single reply gets 0.5.

    Raises:
        ValueError: a setting is wrong.
        JudgeError: the judge gave no usable reply.
    """
    count = len(samples)
    if opponents < 0 or retries < 0:
        raise ValueError(f"settings are opponents = {opponents}, retries = {retries}: neither may be negative")
    if not template:
        reference = REFERENCE if samples[0].answer else ""
        template = f"{TASK}Which of these two answers is better?{GIVEN}{reference}{_PAIR}\n{_TOLD}"
    if count == 1:
        return [{"reward": 0.5}]
    texts = [sample.response if thinking else visible(sample.response) for sample in samples]
    pairs = _pairs(count, opponents)

    async def of_first(first: int, second: int) -> float:
        if texts[first] == texts[second]:
            return 0.5
        question = fill(template, samples[0], ("first", "second"), first=texts[first], second=texts[second])
        return _OF_FIRST[await ask(conversation(system, question), read=read_side, retries=retries)]

    results = await asyncio.gather(
        *(of_first(*order) for one, other in pairs for order in ((one, other), (other, one)))
    )
    wins, agree, compared = [0.0] * count, [0] * count, [0] * count
    for (one, other), there, back in zip(pairs, results[::2], results[1::2], strict=True):
        share = (there + 1 - back) / 2
        for sample, won in ((one, share), (other, 1 - share)):
            wins[sample] += won
            agree[sample] += there == 1 - back
            compared[sample] += 1
    return [
        {"reward": won / times, "consistent": same / times}
        for won, same, times in zip(wins, agree, compared, strict=True)
    ]


def _pairs(count: int, opponents: int) -> list[tuple[int, int]]:
    """Return the pairs of sample indices to compare, without duplicates.

    Each sample meets the next `opponents` samples in a circle, or all others if `opponents` is 0.
    """
    reach = min(opponents or count, count - 1)
    found = {tuple(sorted((one, (one + step) % count))) for one in range(count) for step in range(1, reach + 1)}
    return sorted((one, other) for one, other in found)
