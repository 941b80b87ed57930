"""From groups to packed micro-batches and step files: numpy only.

Nothing here knows a model, a process group or the board.
"""
