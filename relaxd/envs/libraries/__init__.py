"""Adapters for environments of other libraries, which stay unmodified: a file for each library. They run in an
interpreter that has the library (agent.python)."""
