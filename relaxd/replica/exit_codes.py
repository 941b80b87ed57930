"""What a process's exit code says to whoever supervises it. Imports nothing: the supervisor forks."""

RESTART = 75
"""It was told to end so that it is started again (Replica.Restart): no failure of its own. sysexits.h: EX_TEMPFAIL."""
