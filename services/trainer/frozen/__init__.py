"""The service of a role that holds a frozen model, the reference or the teacher: forward only, on ranks of its own.

`program` starts it, `service` is the parent process, which never imports torch, `rank` one of its ranks, `logprobs` the
work on the board.
"""
