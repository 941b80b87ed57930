"""Runs from their start to their end: publishing, evaluating, exporting, and their files.

`manager.py` has all runs, `active_run.py` the one under way.
"""
