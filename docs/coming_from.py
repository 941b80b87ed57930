"""Writes docs/coming-from.md from the table of equivalents: `.venv/bin/python docs/coming_from.py`."""

from pathlib import Path

from relaxd.config.other_frameworks import EQUIVALENTS, FRAMEWORKS, Equivalent

PAGE = Path(__file__).with_name("coming-from.md")
HEAD = """\
# Coming from TRL, verl, prime-rl or Relax

What settings are called there and here, written from
[`relaxd/config/other_frameworks.py`](../relaxd/config/other_frameworks.py). slime has most of the flags of
Relax, rednote's engine on Ray. The
error for an unknown setting says the same: `rollout.n is not a known setting; verl's actor_rollout_ref.rollout.n is
rollout.samples_per_prompt here`. [settings.md](settings.md) has every setting with its meaning.

Batches count differently: `trainer.groups_per_step` and verl's `data.train_batch_size` count prompts, TRL, prime-rl and
`--global-batch-size` count samples. A reward here is a function of one sample, which has `prompt`, `messages`,
`response`, `answer` and `metadata`, or of a group of them ([rewards.md](rewards.md)).
"""


def page() -> str:
    """Return the page."""
    text = HEAD + "\n## From relaxd\n\n" + _header("relaxd", *FRAMEWORKS, "note")
    text += "".join(_row(f"`{one.setting}`", *map(_names, FRAMEWORKS, [one] * 4), one.note) for one in _known())
    for framework in FRAMEWORKS:
        text += f"\n## From {framework}\n\n" + _header(framework, "relaxd", "note")
        found = sorted((name, one) for one in EQUIVALENTS for name in one.names[framework])
        text += "".join(
            _row(f"`{name}`", f"`{one.setting}`" if one.setting else "none", one.note) for name, one in found
        )
    return text


def _known() -> list[Equivalent]:
    return [one for one in EQUIVALENTS if one.setting]


def _names(framework: str, equivalent: Equivalent) -> str:
    return ", ".join(f"`{name}`" for name in equivalent.names[framework])


def _header(*cells: str) -> str:
    return _row(*cells) + _row(*["---"] * len(cells))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
