"""The SGLang engine: SGLang's scheduler processes, and a process of relaxd that drives them.

`sglang_process.py` is the child process.
"""
