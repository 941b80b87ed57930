"""Environments of other libraries, unmodified: one file each, in an interpreter that has the library (agent.python)."""
