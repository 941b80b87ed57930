"""Replicas of the services: registration, heartbeats, leases on GPUs, assignment, drain.

A service implements `replica_service.ReplicaService`; `replica_life.run_replica` runs it.
"""

RESTART = 75
"""Exit code of a process that Replica.Restart ended, which is no failure (EX_TEMPFAIL in sysexits.h)."""
