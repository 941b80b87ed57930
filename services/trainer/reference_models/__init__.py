"""The service of a frozen model, the reference or the teacher: forward only, on its own ranks.

`frozen_service` is the parent process, which never imports torch, `frozen_rank` one of its ranks with their collective
commands, `model_rank` the base of every rank with a stage and a model and the stage's work on the board, and
`followed_folder` the run's files, for new weights of a reference and for the critic.
"""
