"""Writes docs/settings.md from the configuration's docstrings: `.venv/bin/python docs/settings.py`."""

from pathlib import Path

from relaxd.config.algorithm import BUILT_IN
from relaxd.config.settings_table import Setting, sections, settings
from relaxd.config.write_toml import toml

ALGORITHMS = tuple(BUILT_IN)
PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# Settings

Every setting of a run, written from the docstrings in [`relaxd/config`](../relaxd/config). A setting without a default
must be given. `relaxd config show my.toml` prints this for your configuration, with its values, and
`relaxd config show my.toml --diff` only what differs from the defaults. Each setting is also an option of the command
line: `relaxd run my.toml --trainer.optimizer.lr 1e-5`. [coming-from.md](coming-from.md) has the names of settings in
TRL, verl, prime-rl and Relax. Section [algorithm] depends on `algorithm.name`; [algorithms.md](algorithms.md) compares
the algorithms. A default that differs between them stands behind their names.
"""


def page() -> str:
    """Return the page."""
    text = HEAD
    for section, meaning in sections().items():
        known = [setting for place, setting in settings().items() if place[:-1] == section]
        text += f"\n## [{'.'.join(section)}]\n\n{meaning}\n\n"
        text += "| setting | takes | default | meaning |\n| --- | --- | --- | --- |\n"
        text += "".join(map(_row, known))
    return text


def _row(setting: Setting) -> str:
    default, meaning = "" if setting.required else _default(setting), setting.meaning
    having = {name: settings(name)[setting.place] for name in ALGORITHMS if setting.place in settings(name)}
    if len(having) < len(ALGORITHMS):
        whose = ", ".join(f"`{name}`" for name in having) or "an algorithm of your own"
        meaning += f" Only for {whose}."
    others = [f"{name}: {_default(own)}" for name, own in having.items() if own.default != setting.default]
    cells = (f"`{setting.place[-1]}`", setting.kind, "; ".join([default, *others]), meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _default(setting: Setting) -> str:
    return "not set" if setting.default is None else f"`{toml(setting.default)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
