"""A run's report: curves, times and figures from the files in its folder.

`relaxd report` is the command.
"""
