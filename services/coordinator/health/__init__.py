"""Health of a run's replicas and roles.

`health_policy.py` decides on records only; `health_manager.py` carries its decisions out.
"""
