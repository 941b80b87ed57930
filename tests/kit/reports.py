"""The data in a report.html."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any


def read_report(path: Path) -> dict[str, Any]:
    """Return the data of a report: the run, the answers to its views by name, and among those the charts."""
    text = path.read_text()
    data: dict[str, Any] = json.loads(_script(text, "data"))
    data["answers"]["charts"] = json.loads(gzip.decompress(base64.b64decode(_script(text, "chart-data"))))
    return data


def _script(text: str, name: str) -> str:
    match = re.search(f'<script type="[a-z/]+" id="{name}">(.*?)</script>', text, re.DOTALL)
    assert match, name
    return match[1]
