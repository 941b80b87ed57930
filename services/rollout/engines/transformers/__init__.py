"""The transformers engine: a model in this process, on a CPU or a GPU.

`process.py` is the child process.
"""
