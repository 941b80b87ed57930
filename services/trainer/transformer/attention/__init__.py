"""Attention over packed sequences: heads, the sequences' layout in a micro-batch, and the kernels.

`attention_kernels.py` chooses the kernel; `sequence_layout.py` says where each token is.
"""
