"""Health of a run's replicas and roles: signs, decisions, restarts, rebuilds.

Decisions are pure functions on records; `health_manager.py` carries them out.
"""
