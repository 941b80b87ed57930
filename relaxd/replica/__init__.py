"""Replicas of the services: registration, heartbeats, leases on GPUs, assignment, drain.

A service implements `service.ReplicaService`; `replica.run_replica` runs it.
"""
