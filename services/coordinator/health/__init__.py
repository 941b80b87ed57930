"""Health of a run's replicas and roles.

`detection.py` finds what is wrong in heartbeats, `policy.py` decides on records only, and `health_manager.py`
carries its decisions out.
"""
