"""Nothing waits without saying why: a loop that waits and looks again is where a process spends its long waits.

Each pause of such a loop is inside `with waiting(...)` (relaxd.waiting), or has a comment, on its line or above it,
that says why nobody needs a name for it:

    # idle: WHY    there is nothing to do: nobody waits for this loop
    # brief: WHAT  it ends within seconds, or at the deadline that is named
    # named: BY    somebody else says it: a caller, the replica's status, Run.waiting_for, a line for the user

Waits without a deadline have a rule of their own: test_no_endless_wait.
"""

import re
from functools import cache

from tests.unit.source_code.calls import ROOT, Place, calls

PAUSES = {"sleep", "wait", "wait_for"}
EXEMPT = re.compile(r"# (idle|brief|named): \S")


@cache
def lines(file: str) -> list[str]:
    return (ROOT / file).read_text().splitlines()


def is_exempt(place: Place) -> bool:
    last = place.call.end_lineno or place.call.lineno
    return any(EXEMPT.search(line) for line in lines(place.file)[place.call.lineno - 2 : last])


def pauses() -> list[Place]:
    return [place for place in calls() if place.looped and place.name in PAUSES]


def test_every_wait_in_a_loop_is_named_or_says_why_not() -> None:
    wrong = [
        f"{place.file}:{place.call.lineno}: {place.text[:100]}"
        for place in pauses()
        if not place.named and not is_exempt(place)
    ]
    assert not wrong, "put it into `with waiting(...)`, or say why not:\n" + "\n".join(wrong)


def test_the_rule_sees_the_waits() -> None:
    found = pauses()
    assert len(found) > 60
    assert sum(place.named for place in found) >= 4


def test_no_exemption_is_left_over() -> None:
    exempted = {
        (place.file, number)
        for place in pauses()
        for number in range(place.call.lineno - 1, (place.call.end_lineno or place.call.lineno) + 1)
    }
    left = [
        f"{file}:{number}: {line.strip()}"
        for file in sorted({place.file for place in calls()})
        for number, line in enumerate(lines(file), start=1)
        if EXEMPT.search(line) and (file, number) not in exempted
    ]
    assert not left, "exemptions of nothing:\n" + "\n".join(left)
