"""The critic service: values as a stage of the board, and a critic that follows the ledger.

`service` is the parent process, which never imports torch, `rank` one of its ranks, `follower` what rank 0 does,
`learner` the critic of one rank, `commands` what the ranks do together.
"""
