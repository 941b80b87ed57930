"""The service of a frozen model, the reference or the teacher: forward only, on its own ranks.

`program` starts it, `service` is the parent process, which never imports torch, `rank` one of its ranks, `logprobs` the
work on the board, `commands` the collective commands, `refreshing` new weights of a reference, `stage_rank`
the base of every rank with a stage and a model, and `run_folder` the run's files, for the critic, too.
"""
