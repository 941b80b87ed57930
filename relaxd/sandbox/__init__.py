"""Runs code that nobody trusts, such as what a model wrote. Needs Linux, and only Python's standard library."""
