"""Health of a run's replicas and roles.

Reconcilers decide on records only; `health_manager.py` carries their decisions out.
"""
