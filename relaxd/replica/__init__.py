"""Replicas of the services: registration, heartbeats, leases on GPUs, assignment, drain.

A service implements `replica_service.ReplicaService`; `replica_life.run_replica` runs it.
"""

RESTART = 75
"""Exit code of a replica's process after Replica.Restart. It means no failure (EX_TEMPFAIL in sysexits.h)."""
