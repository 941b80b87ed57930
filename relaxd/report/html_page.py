"""Renders report.html: the console's views and a run's data in one file, which needs no network."""

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from relaxd.report.charts import chart_data
from relaxd.report.report_data import report_data
from relaxd.report.run_result import RunResult

ASSETS = Path(__file__).with_name("assets")
"""Folder of the views, which the console serves as well, and of the report's page."""
IMPORT = re.compile(r'^import (?:\* as (\w+)|(\{[\w, ]*\})) from "\./(\w+\.js)";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)


def render_html(result: RunResult) -> str:
    """Render the report of a run as one self-contained HTML file."""
    scripts = [_asset("uplot/uPlot.iife.min.js"), _asset("charts.js"), bundle(ASSETS, "report.js")]
    return Template(_asset("report.html")).substitute(
        title=html.escape(result.run_id),
        policy=_policy(scripts),
        uplot_css=_asset("uplot/uPlot.min.css"),
        css=_asset("page.css"),
        license=html.escape(_asset("uplot/LICENSE")),
        uplot=scripts[0],
        charts=scripts[1],
        script=scripts[2],
        chart_data=packed(chart_data(result.lines)),
        data=_embedded(report_data(result)),
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _policy(scripts: list[str]) -> str:
    """Return the page's Content-Security-Policy: only its own scripts, and styles, images and sounds within the
    page."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {sources}; {rest}"


def packed(data: Mapping[str, Any]) -> str:
    """Compress data for the page; base64 holds nothing that HTML could take for markup."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _embedded(data: Mapping[str, Any]) -> str:
    """Return data as JSON without characters that HTML could read as markup."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def bundle(folder: Path, entry: str) -> str:
    """Return a script that runs the module `entry` of a folder, with those that it imports.

    A browser loads no modules for a page that is a file. Imports are of whole modules or of names, from the same folder
    and on a line each; exports are declarations.
    """
    texts: dict[str, str] = {}
    _collect(folder, entry, texts)
    parts = [f'modules["{name}"] = (() => {{\n{_as_function(text)}\n}})();' for name, text in texts.items()]
    return "\n".join(['"use strict";', "{", "const modules = {};", *parts, "}"])


def _collect(folder: Path, name: str, texts: dict[str, str]) -> None:
    """Add a module after the modules that it imports."""
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
