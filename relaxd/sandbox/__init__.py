"""Runs untrusted code, such as programs that a model wrote. Needs Linux, and imports only the standard library."""
