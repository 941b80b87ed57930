"""GPU kernels in Triton, and the autograd functions around them.

Each has an equivalent in plain torch for machines on which Triton doesn't run.
"""
