"""Functions of the tests that move for players of TextArena."""

import re


def first_move(observation: str) -> str:
    """Take the first of the moves that are still there."""
    *_, moves = re.findall(r"Available Moves: (.*)", observation)
    return str(moves.split(",")[0].strip().strip("'"))
