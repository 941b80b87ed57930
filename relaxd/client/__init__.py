"""The Python client of the coordinator.

The command line uses nothing else to talk with services.
"""
