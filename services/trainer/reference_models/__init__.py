"""The service of a frozen model, the reference or the teacher: forward only, on its own ranks.

`frozen_service` is the parent process, which never imports torch; `frozen_rank` is the process of one rank, with the
commands that ranks call together; `model_rank` has the base class of ranks that hold a model, and the stage's work on
the board; `followed_folder` waits for the run's files (also for the critic), and loads new weights of a reference.
"""
