"""Processes: children that run torch or users' code, the channel to them, and signals."""
