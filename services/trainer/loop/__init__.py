"""The training loop: rank 0 fills, trains and commits steps; the other ranks run its commands.

This code runs in the rank processes (`training_rank.py`). Weight broadcasts to the engines start here.
"""
