"""Programs on a run's folder, without services: replay and export.

The command line starts them as child processes.
"""
