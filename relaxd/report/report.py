"""Writes report.html and curve.png of a run from the files in its folder."""

from importlib.util import find_spec
from pathlib import Path

from relaxd.report.curve import draw_curve
from relaxd.report.page import render_html
from relaxd.report.result import read_result


def write_report(folder: Path) -> Path:
    """Write report.html, and with matplotlib curve.png, into a run's folder. Returns the report's path.

    Raises CliError.
    """
    result = read_result(folder)
    if find_spec("matplotlib") is not None:
        (folder / "curve.png").write_bytes(draw_curve(result))
    report = folder / "report.html"
    report.write_text(render_html(result), encoding="utf-8")
    return report
