"""Replicas of the services: registration, heartbeats, leases on GPUs, assignment, drain.

A service implements `replica_service.ReplicaService`; `replica_life.run_replica` runs it.
"""

RESTART = 75
"""The process ended because of Replica.Restart, not because of a failure (EX_TEMPFAIL in sysexits.h)."""
