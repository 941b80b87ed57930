"""verl's tools of several turns, as a reward of one turn."""

from collections.abc import Callable
from typing import Any

CALLS = "rollout.multi_turn.max_parallel_calls"
NOTE = "answers end after one turn; observations are not fed back"


def add_tools(values: dict[str, Any], notes: list[str], lost: list[Any], get: Callable[..., Any]) -> None:
    """Make a file of tools, which is data.tools_file already, the reward verl_tools too, besides a reward of one's own.

    Args:
        values: relaxd's settings by dotted name, which are changed.
        notes: what a person must look at.
        lost: keys without an equivalent, from which that of parallel calls is taken.
        get: returns a value of verl, or another for a key that isn't there.
    """
    if "data.tools_file" not in values:
        return
    lost[:] = [one for one in lost if not one[0].endswith(CALLS)]
    settings = {"config": values["data.tools_file"], "max_calls": int(get(CALLS, 1) or 0)}
    notes.append(f"data.tools_file and the reward verl_tools: {NOTE}")
    if "reward.name" in values:
        own: dict[str, Any] = {"name": values.pop("reward.name")}
        for key in ("settings", "key"):
            if (found := values.pop(f"reward.{key}", None)) is not None:
                own[key] = found
        values["reward.terms"] = [own, {"name": "verl_tools", "settings": settings}]
        notes.append("reward.terms: what the tools say is added; weight = 0.0 makes it a metric, as it is in verl")
        return
    values["reward.name"], values["reward.settings"] = "verl_tools", settings
    if values.pop("reward.choose_by", None):
        notes.append("reward.name: verl scores by data_source; replace or complete verl_tools by [[reward.terms]]")
