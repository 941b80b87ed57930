"""Attention over packed sequences: heads, their layout in a micro-batch, and the kernels.

`attention_kernels.py` chooses the kernel; `sequence_layout.py` says which token is where.
"""
