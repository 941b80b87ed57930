"""Print docs/metrics.md."""

from relaxd.telemetry.metrics import markdown

print(markdown(), end="")
