"""The critic service: computes values as a stage of the board, and trains its critic on the ledger's steps.

`__main__` is the parent process, which never imports torch; `critic_rank` is the process of one rank, with the follower
on rank 0; `critic_learner` has a rank's critic and the commands that ranks call together.
"""
