"""The training loop of the ranks: rank 0 fills, updates and commits steps, the others follow it.

Every file runs in a rank process (`rank.py`); weights leave for the engines from here.
"""
