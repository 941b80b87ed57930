"""The SGLang engine: SGLang's scheduler processes, and a process of ours that drives them.

`process.py` is the child process.
"""
