"""The life of a service that is not the coordinator: registration, heartbeats, leases, assignment, drain.

A service implements `service.py`; `replica.py` lives its life.
"""
