"""Groups, packed micro-batches, plans and step files, in numpy only.

Nothing here depends on a model, a process group or the board.
"""
