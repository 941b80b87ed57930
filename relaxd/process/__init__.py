"""Processes: children that run torch or people's code, the channel between them and their service, and signals."""
