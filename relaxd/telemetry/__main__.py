"""Prints the content of docs/metrics.md, generated from the table of metrics."""

from relaxd.telemetry.metrics import markdown

print(markdown(), end="")
