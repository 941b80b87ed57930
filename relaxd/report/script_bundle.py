"""JavaScript modules as one script, for a page that is a file: a browser loads no modules from there."""

import re
from pathlib import Path

IMPORT = re.compile(r'^import (?:\* as (\w+)|(\{[\w, ]*\})) from "\./(\w+\.js)";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)


def bundle(folder: Path, entry: str) -> str:
    """Return a script that runs the module `entry` of a folder, with those that it imports.

    Imports are of whole modules or of names, from the same folder and on a line each; exports are declarations.
    """
    texts: dict[str, str] = {}
    _collect(folder, entry, texts)
    parts = [f'modules["{name}"] = (() => {{\n{_as_function(text)}\n}})();' for name, text in texts.items()]
    return "\n".join(['"use strict";', "{", "const modules = {};", *parts, "}"])


def _collect(folder: Path, name: str, texts: dict[str, str]) -> None:
    """Add a module after those that it imports."""
    if name in texts:
        return
    text = (folder / name).read_text(encoding="utf-8")
    for match in IMPORT.finditer(text):
        _collect(folder, match[3], texts)
    texts[name] = text


def _as_function(text: str) -> str:
    """Return the body of a function that returns a module's exports."""
    exports = ", ".join(match[2] for match in EXPORT.finditer(text))
    body = EXPORT.sub(r"\1 \2", IMPORT.sub(r'const \1\2 = modules["\3"];', text))
    return f"{body}\nreturn {{ {exports} }};"
