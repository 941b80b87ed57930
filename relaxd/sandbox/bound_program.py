"""`python -I -S bound_program.py PARENT COMMAND...`: becomes a program that Linux kills when its parent ends.

PARENT is the parent's process id. Exit code 127: COMMAND can't be executed. This file is run by its path and with the
standard library alone, so that it starts in milliseconds.
"""

import os
import sys
from pathlib import Path


def main(parent: str, *command: str) -> None:
    """Replace this process with the program."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from relaxd.sandbox.privileges import die_with_parent

    die_with_parent()
    if os.getppid() != int(parent):
        sys.exit("the parent has ended")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} can't be executed: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(*sys.argv[1:])
