"""The service of a role that holds a frozen model, the reference or the teacher: forward only, on ranks of its own.

`program` starts it, `service` is the parent process, which never imports torch, `rank` one of its ranks, `logprobs` the
work on the board, `commands` what the ranks do together, `refreshing` how a reference gets other weights, `stage_rank`
what a rank of any role with a stage and a model has, and `run_folder` what it finds of the run: the critic's, too.
"""
