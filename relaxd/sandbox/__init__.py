"""Runs untrusted code, such as a model's. Needs Linux, and only Python's standard library."""
