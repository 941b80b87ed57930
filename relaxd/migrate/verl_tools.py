"""verl's tools of several turns, as a reward of one turn."""

from typing import Any

from relaxd.migrate.migrated import Fate, Reader

CALLS = "rollout.multi_turn.max_parallel_calls"
NOTE = "answers end after one turn; observations are not fed back"


def add_tools(reader: Reader) -> None:
    """Make a file of tools, which is data.tools_file already, the reward verl_tools too, beside one's own reward."""
    out, values, notes = reader.out, reader.out.values, reader.out.notes
    if "data.tools_file" not in values:
        return
    for name in [name for name in out.fates if name.endswith(CALLS)]:
        out.fates[name] = Fate.WRITTEN
        out.lost[:] = [one for one in out.lost if one[0] != name]
        out.idle[:] = [one for one in out.idle if one[0] != name]
    settings = {"config": values["data.tools_file"], "max_calls": int(reader.get(CALLS, 1) or 0)}
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
