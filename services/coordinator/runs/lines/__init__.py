"""Files of a run with a line per step, which one coordinator at a time appends to."""
