"""The training loop: rank 0 fills, trains and commits steps; other ranks run the commands of rank 0.

This code runs in the rank processes (`training_rank.py`). Weight broadcasts to the engines start here.
"""
