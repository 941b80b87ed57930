"""The reference service: the initial model, forward only, on ranks of its own.

`service` is the parent process, which never imports torch, `rank` one of its ranks, `stage` the work on the board.
"""
