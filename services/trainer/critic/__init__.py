"""The critic service: values as a stage of the board, and a critic that follows the ledger.

`__main__` is the parent process, which never imports torch, `critic_rank` one of its ranks, with the follower of rank
0, and `critic_learner` the critic of one rank, with the commands of its ranks.
"""
