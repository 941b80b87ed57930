"""The SGLang engine: SGLang's scheduler processes, and a process of relaxd's own that drives them.

`sglang_process.py` is the child process.
"""
