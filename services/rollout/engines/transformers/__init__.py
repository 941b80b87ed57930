"""The transformers engine: a transformers model in the child process.

`transformers_process.py` is the child process.
"""
