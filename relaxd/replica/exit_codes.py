"""Exit codes of replicas, for their supervisor. Imports nothing: the supervisor forks."""

RESTART = 75
"""The process ended because of Replica.Restart, not because of a failure (EX_TEMPFAIL in sysexits.h)."""
