"""GPU kernels in Triton, and the autograd functions around them.

Each has a plain torch equivalent that is used where Triton can't run.
"""
