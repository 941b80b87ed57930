"""The transformers engine: a transformers model in the child process.

`process.py` is the child process.
"""
