"""Weight synchronisation, and GPU handoff in colocated runs.

The weights themselves never pass through the coordinator.
"""
