"""Functions by which a process permanently gives up privileges: capabilities, set-user-id programs, its user's
rights.

`python -I -S privileges.py PARENT COMMAND...` becomes a program that Linux kills when the process with the id PARENT
ends. Exit code 127: COMMAND can't be executed. The file is run by its path and with the standard library alone, so that
it starts in milliseconds.
"""

import ctypes
import errno
import os
import signal
import sys

_CAPABILITIES_VERSION = 0x20080522
_NEW_USER_NAMESPACE = 0x10000000
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 1, 4, 38


def no_new_privileges() -> None:
    """Permanently prevent this process from gaining privileges through set-user-id programs. Raises OSError.

    Linux requires this before an unprivileged process may restrict itself.
    """
    _prctl(_SET_NO_NEW_PRIVILEGES, 1, "PR_SET_NO_NEW_PRIVS")


def die_with_parent() -> None:
    """Make Linux kill this process when the thread that started it ends; a later change of user cancels this.

    Raises OSError.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, "PR_SET_PDEATHSIG")


def drop_capabilities() -> None:
    """Permanently give up all Linux capabilities, which only root has. Raises OSError."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())):
        raise OSError(ctypes.get_errno(), "capabilities can't be given up")


def become(user: int) -> None:
    """Permanently change this process's user to the id `user`, and its only group to the same id. Raises OSError."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _prctl(_SET_DUMPABLE, 1, "PR_SET_DUMPABLE")  # otherwise root owns this process's files in /proc


def enter_user_namespace() -> None:
    """Move this process to a new user namespace with the current user only; Linux counts its processes separately.

    The process must have a single thread. Raises OSError if namespaces are forbidden, as in many containers.
    """
    if (child := os.fork()) == 0:  # in a child first: a failed last step leaves a process as user nobody
        code = errno.EPERM
        try:
            _enter_user_namespace()
            code = 0
        except OSError as error:
            code = error.errno or code
        finally:
            os._exit(code)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(abs(code), os.strerror(abs(code)))
    _enter_user_namespace()


def _enter_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER_NAMESPACE):
        raise OSError(ctypes.get_errno(), "unshare")
    for path, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{path}", "w") as file:
            file.write(text)


def _prctl(option: int, value: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"{name} can't be set")


def become_bound_program(parent: str, *command: str) -> None:
    """Replace this process with a program that ends no later than its parent, the process `parent`."""
    die_with_parent()
    if os.getppid() != int(parent):
        sys.exit("the parent has ended")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} can't be executed: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    become_bound_program(*sys.argv[1:])
