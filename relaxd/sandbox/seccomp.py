"""A filter of system calls (seccomp), and the tables of denied calls. A process can't remove the filter."""

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
import termios
from collections.abc import Iterable, Sequence

_Numbers = tuple[int, int | None]
"""A system call's numbers on x86-64 and on arm64; None if arm64 lacks the call."""
DENIED: dict[str, _Numbers] = {
    # Connections. Socket pairs are in ARGUMENTS: asyncio needs one. A filter can't see the addresses of sendmsg.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Other programs and processes. clone is in ARGUMENTS: threads are allowed.
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Attributes, locks and changes of files, which Landlock doesn't guard.
    "flock": (73, 32),
    "inotify_add_watch": (254, 27),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "mknod": (133, None),
    "mknodat": (259, 33),
    # Memory and messages that outlive a process.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Namespaces, mounts, and the kernel.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "personality": (135, 92),
}
WRITING: dict[str, _Numbers] = {
    "creat": (85, None),
    "truncate": (76, 45),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rmdir": (84, None),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "openat2": (437, 437),
}
"""System calls that change files, which answers may not make; Landlock forbids them, too. `openat2` is denied because
the filter can't see whether it opens a file for writing; Python doesn't use it."""
ARGUMENTS: dict[str, _Numbers] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "prctl": (157, 167),
    "open": (2, None),
    "openat": (257, 56),
    "socketpair": (53, 199),
    "sendto": (44, 206),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
}
"""System calls that answers may make only with certain arguments, as `filter_calls` says."""
ADMINISTRATION = (
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "open_by_handle_at", "fanotify_init", "bpf", "perf_event_open"),
    *("userfaultfd", "keyctl", "add_key", "request_key", "init_module", "finit_module", "delete_module", "kexec_load"),
    *("kexec_file_load", "reboot", "swapon", "swapoff", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex"),
    *("acct", "quotactl", "quotactl_fd", "syslog", "iopl", "ioperm"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "mknod", "mknodat"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),  # they open sockets unseen
)
"""Names of the system calls in DENIED that are also denied to enclosed programs, which are trusted more than answers:
they may start processes and use files."""


_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Byte offsets of call number, architecture and first argument in the kernel's struct seccomp_data."""
_X32 = 0x40000000
"""Lowest system call number of the x32 ABI, x86-64's second set of calls, which is denied."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""For each machine type: the index of its numbers in the tables of calls, and the kernel's AUDIT_ARCH constant."""
_SET_SECCOMP, _MODE_FILTER = 22, 2
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000
"""Flags of clone for all namespaces except the time namespace, which clone can't create."""
_SET_PARENT_DEATH_SIGNAL = 1
_SOCKET_TYPE = 0xF
"""Mask of the socket type in socketpair's second argument; the other bits are flags."""
_FCNTL = (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL)
"""Commands of fcntl that an answer may use: none that makes the kernel send signals, or locks or leases a file."""
_IOCTL = (*(termios.TCGETS, termios.TIOCGWINSZ, termios.FIONREAD, termios.FIONBIO, termios.FIOCLEX, termios.FIONCLEX),)
"""Commands of ioctl that an answer may use: none that makes the kernel send signals, or changes a file's attributes."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def supported() -> bool:
    """Return True if the system call filter supports this machine's processor architecture."""
    return platform.machine() in _ARCHITECTURES


def filter_calls(pid: int) -> None:
    """Permanently restrict the system calls of this process, which runs an answer. Raises OSError.

    The process may signal only itself (`pid` is its id), start threads but no processes, open files only for reading,
    and send only to the other end of a pair of stream sockets.
    """
    rules = {
        "clone": _unless(_step(_ANY_BIT, _CLONE_THREAD, 1, 0)),
        "clone3": [_deny(errno.ENOSYS)],  # its flags can't be seen; libraries then use clone
        "kill": _unless(_step(_EQUAL, pid, 1, 0)),
        "tgkill": _unless(_step(_EQUAL, pid, 1, 0)),
        "prlimit64": _unless(_step(_EQUAL, 0, 1, 0)),
        "prctl": _unless(_step(_EQUAL, _SET_PARENT_DEATH_SIGNAL, 0, 1)),
        "open": _unless(_step(_ANY_BIT, _WRITES, 0, 1), argument=1),
        "openat": _unless(_step(_ANY_BIT, _WRITES, 0, 1), argument=2),
        "socketpair": [
            *_deny_unless_equal(0, socket.AF_UNIX),
            *(_load(1), _step(_AND, _SOCKET_TYPE), _step(_EQUAL, socket.SOCK_STREAM, 1, 0), _deny(errno.EPERM)),
            _step(_RETURN, _ALLOW),
        ],
        "sendto": [
            *(step for half in (0, 4) for step in _deny_unless_equal(4, 0, half)),  # a null pointer: no address
            _step(_RETURN, _ALLOW),
        ],
        "fcntl": _only(_FCNTL, argument=1),
        "ioctl": _only(_IOCTL, argument=1),
    }
    _install([*DENIED.values(), *WRITING.values()], [(ARGUMENTS[name], rule) for name, rule in rules.items()], _KILL)


def filter_programs(network: bool) -> None:
    """Permanently restrict the system calls of this process and the programs that it starts, less than for answers.

    They can't administer the machine, create namespaces or mounts, or trace processes. Without `network` they can open
    only local sockets; opening others fails as if there were no network. Raises OSError, also if the filter doesn't
    support this machine.
    """
    if not supported():
        raise OSError(errno.ENOSYS, "the filter of system calls (seccomp) needs x86-64 or arm64")
    rules: list[tuple[_Numbers, list[bytes]]] = [
        (ARGUMENTS["clone"], _unless(_step(_ANY_BIT, _CLONE_NAMESPACES, 0, 1))),
        (ARGUMENTS["clone3"], [_deny(errno.ENOSYS)]),  # its flags can't be seen; libraries then use clone
    ]
    if not network:
        local = _unless(_step(_EQUAL, socket.AF_UNIX, 1, 0), error=errno.ENETUNREACH)
        rules += [(DENIED["socket"], local), (ARGUMENTS["socketpair"], local)]  # their first argument is the family
    _install([DENIED[name] for name in ADMINISTRATION], rules, _ERROR | errno.EPERM)


def _install(denied: Iterable[_Numbers], rules: Iterable[tuple[_Numbers, list[bytes]]], foreign: int) -> None:
    """Install a seccomp filter that denies the system calls in `denied` and checks those in `rules`; others are
    allowed.

    A rule is a call's numbers and the filter instructions to execute for it. `foreign` is the filter's result for calls
    of another architecture. Raises OSError.
    """
    column, architecture = _ARCHITECTURES[platform.machine()]
    code = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, architecture, 1, 0), _step(_RETURN, foreign)]
    code += [_step(_LOAD, _NUMBER), _step(_AT_LEAST, _X32, 0, 1), _deny(errno.EPERM)]
    for numbers, rule in (*((numbers, [_deny(errno.EPERM)]) for numbers in denied), *rules):
        if (number := numbers[column]) is not None:
            code += [_step(_EQUAL, number, 0, len(rule)), *rule]
    code.append(_step(_RETURN, _ALLOW))
    text = ctypes.create_string_buffer(b"".join(code))
    program = _Program(len(code), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"the filter of system calls (seccomp) can't be set: {os.strerror(number)}")


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _deny(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _load(argument: int, half: int = 0) -> bytes:
    """Return the filter instruction that loads 32 bits of a system call's 64-bit argument: the lower ones (`half` = 0)
    or the upper ones (`half` = 4)."""
    return _step(_LOAD, _FIRST_ARGUMENT + 8 * argument + half)


def _unless(test: bytes, argument: int = 0, error: int = errno.EPERM) -> list[bytes]:
    """Return filter instructions that deny a system call unless its argument passes `test`.

    `test` is an instruction that reads the argument's lower 32 bits, and skips the next instruction, the denial, if the
    call is allowed.
    """
    return [_load(argument), test, _deny(error), _step(_RETURN, _ALLOW)]


def _only(values: Sequence[int], argument: int) -> list[bytes]:
    """Return filter instructions that deny a system call unless its argument's lower 32 bits are one of `values`."""
    tests = [_step(_EQUAL, value, len(values) - number, 0) for number, value in enumerate(values)]
    return [_load(argument), *tests, _deny(errno.EPERM), _step(_RETURN, _ALLOW)]


def _deny_unless_equal(argument: int, value: int, half: int = 0) -> list[bytes]:
    """Return filter instructions that deny a system call unless 32 bits of its argument (see `_load`) equal `value`;
    otherwise the next instructions decide."""
    return [_load(argument, half), _step(_EQUAL, value, 1, 0), _deny(errno.EPERM)]
