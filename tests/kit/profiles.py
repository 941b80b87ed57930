"""Reading traces of torch's profiler."""

import gzip
import json
from collections import Counter
from pathlib import Path


def operations(path: Path) -> Counter[str]:
    """Return how often each operation is in a trace, which must be one that Perfetto reads."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return Counter(event["name"] for event in events if event["ph"] == "X" and event["dur"] >= 0)
