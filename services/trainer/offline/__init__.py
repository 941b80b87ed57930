"""Programs that work on a run's folder without any service: replay and export.

The command line starts them as child processes.
"""
