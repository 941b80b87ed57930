"""Programs on a run's folder, without services: replay, fork and export.

The command line starts them as child processes.
"""
