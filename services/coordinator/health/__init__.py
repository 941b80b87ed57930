"""Health of a run's replicas and roles.

`detection.py` finds problems in heartbeats, `policy.py` decides what to do and changes only records, and
`health_manager.py` executes the decisions.
"""
