"""The SGLang engine: SGLang's scheduler processes, and a process of relaxd's own that drives them.

`process.py` is the child process.
"""
