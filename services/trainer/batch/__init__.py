"""Selection of a step's groups, packed micro-batches, plans and step files. In numpy only.

Nothing here depends on a model or a process group, or calls the board.
"""
