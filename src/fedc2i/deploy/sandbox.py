"""What a process may touch once it has entered the sandbox: enforced by the Linux kernel, without privileges.

Landlock limits files: the process reads only what Python needs, and writes only to the folders it was given. Seccomp
denies system calls: no sockets (so no network and no local services), no other programs or processes, no signals to
others, no reading of their memory. Both are inherited by threads, and neither can be undone.

Landlock needs Linux 5.13, and seccomp a filter for the processor; `missing` names what a machine lacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import socket
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from fedc2i.core.errors import UserError

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # Landlock's system calls, on every processor
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # of prctl
_CAPABILITIES = 0x20080522  # the version of capset's arguments
_READ_FILE, _READ_FOLDER, _WRITE_FILE, _DEVICE_CONTROL = 1 << 2, 1 << 3, 1 << 1, 1 << 15
_READ = _READ_FILE | _READ_FOLDER
_CHANGE = _WRITE_FILE | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 14  # remove, make folders and files, truncate
_FILE = _READ_FILE | _WRITE_FILE | 1 << 14 | _DEVICE_CONTROL  # the rights that a rule for a file may have
_NETWORK, _SCOPE = 0b11, 0b11  # bind and connect TCP; abstract sockets and signals
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # how many rights on files each version knows

_SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share", "/lib", "/lib64", "/etc/ld.so.cache")
_FACTS = ("/etc/localtime", "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_GPU = ("/dev/nvidia*", "/dev/nvidia-caps/*")  # with what CUDA reads of them
_GPU_FACTS = ("/proc/driver/nvidia", "/sys/bus/pci", "/sys/module/nvidia*")

# Denied system calls by number: x86-64, ARM64.
_DENIED = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425),  # its requests pass no filter
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "chroot": (161, 51),
    "userfaultfd": (323, 282),
    # Landlock does not control owners, modes, attributes and times of files.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
_CLONE, _CLONE3, _TGKILL = (56, 220), (435, 435), (234, 131)
_THREAD = 0x10000  # of clone's flags: a thread of this process, not another process
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, and the kernel's name of it
_FOREIGN_NUMBERS = 0x40000000  # x86-64: from here on the same calls under other numbers


def missing() -> list[str]:
    """What this machine lacks for the sandbox; empty if it has all."""
    lacks = [] if landlock_version() >= 1 else ["Landlock (Linux 5.13 and newer)"]
    return lacks if _has_seccomp() else [*lacks, "seccomp filters (Linux on x86-64 or ARM64)"]


@cache
def landlock_version() -> int:
    """Of the kernel's Landlock; 0 if there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(_CREATE, None, 0, 1)))


def _has_seccomp() -> bool:
    return sys.platform == "linux" and platform.machine() in _MACHINES and Path("/proc/sys/kernel/seccomp").is_dir()


def describe() -> str:
    """What holds on this machine, in a line."""
    if lacks := missing():
        return f"no sandbox for the process that handles data: this machine lacks {', '.join(lacks)}"
    return f"the process that handles data runs in a sandbox (Landlock {landlock_version()}, seccomp)"


def require_out_of_reach(path: Path) -> None:
    """Raises a `UserError` if something that must be out of reach lies where Python reads its own files."""
    for folder in (*python_folders(), *map(Path, _SYSTEM)):
        if path.resolve().is_relative_to(folder):
            raise UserError(f"{path}: lies in {folder}, which the process that handles data can read; move the site")


def enter(writable: Sequence[Path], readable: Sequence[Path] = (), forbidden: Sequence[Path] = ()) -> None:
    """Puts this process into the sandbox, as far as the machine has one.

    Call it before other threads exist: only the calling thread and those that it starts are limited.

    Args:
        writable: folders in which files may be changed.
        readable: folders and files that may be read besides Python and its packages.
        forbidden: files that must be out of reach; checked at the end.

    Raises:
        UserError: if the kernel refuses, or something forbidden can still be read.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold the data
    if sys.platform != "linux":
        return
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    _require(prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    _drop_capabilities()
    if landlock_version() >= 1:
        _limit_files(writable, readable)
    if _has_seccomp():
        _limit_calls(prctl)
    _check(forbidden)


def _drop_capabilities() -> None:
    """What root may do beyond its own files, such as loading kernel modules."""
    capset = ctypes.CDLL(None, use_errno=True).capset
    header, none = struct.pack("<Ii", _CAPABILITIES, 0), bytes(24)
    _require(capset(ctypes.c_char_p(header), ctypes.c_char_p(none)), "capabilities")


def _limit_files(writable: Iterable[Path], readable: Iterable[Path]) -> None:
    version = landlock_version()
    handled = (1 << _RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("<QQQ", handled, _NETWORK if version >= 4 else 0, _SCOPE if version >= 6 else 0)
    length = 24 if version >= 6 else 16 if version >= 4 else 8
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    rules = _require(syscall(_CREATE, ctypes.c_char_p(attributes), length, 0), "Landlock")
    try:
        for path, rights in _rules(writable, readable):
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # not on this machine
            try:
                allowed = rights & handled if path.is_dir() else rights & handled & _FILE
                rule = struct.pack("<Qi", allowed, place)
                _require(syscall(_ADD, rules, 1, ctypes.c_char_p(rule), 0), f"Landlock's rule for {path}")
            finally:
                os.close(place)
        _require(syscall(_RESTRICT, rules, 0), "Landlock")
    finally:
        os.close(rules)


def _rules(writable: Iterable[Path], readable: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    for path in (*writable,):
        yield path, _READ | _CHANGE
    for path in (*readable, *map(Path, _SYSTEM), *map(Path, _FACTS), *python_folders()):
        yield path, _READ
    for path in map(Path, _DEVICES):
        yield path, _READ_FILE | _WRITE_FILE
    for path in (found for pattern in _GPU for found in Path("/").glob(pattern[1:])):
        yield path, _READ | _WRITE_FILE | _DEVICE_CONTROL
    for path in (found for pattern in _GPU_FACTS for found in Path("/").glob(pattern[1:])):
        yield path, _READ


def python_folders() -> list[Path]:
    """Where Python, its packages and what is imported from lie."""
    named = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found = {Path(entry).resolve() for entry in (*named, *sys.path) if entry}
    return sorted(path for path in found if path.exists() and path != Path(path.anchor))


def _limit_calls(prctl: Callable[..., int]) -> None:
    """The filter is a small program over the number and arguments of each system call."""
    column, machine = _MACHINES[platform.machine()]
    number, architecture, first = 0, 4, 16  # where they stand in what the filter reads

    def load(place: int) -> tuple[int, int, int, int]:
        return 0x20, 0, 0, place

    def when(test: int, value: int, then: int, otherwise: int) -> tuple[int, int, int, int]:
        return test, then, otherwise, value

    def give(code: int) -> tuple[int, int, int, int]:
        return 0x06, 0, 0, code

    equal, at_least, has = 0x15, 0x35, 0x45
    allow, deny, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    program = [load(architecture), when(equal, machine, 1, 0), give(deny), load(number)]
    if column == 0:
        program += [when(at_least, _FOREIGN_NUMBERS, 0, 1), give(deny)]
    for one in (numbers[column] for numbers in _DENIED.values()):
        if one is not None:
            program += [when(equal, one, 0, 1), give(deny)]
    program += [when(equal, _CLONE3[column], 0, 1), give(unknown)]  # so that threads are made by clone
    program += [when(equal, _CLONE[column], 0, 4), load(first), when(has, _THREAD, 1, 0), give(deny), give(allow)]
    own = os.getpid()
    program += [when(equal, _TGKILL[column], 0, 4), load(first), when(equal, own, 1, 0), give(deny), give(allow)]
    program.append(give(allow))
    code = b"".join(struct.pack("<HBBI", *step) for step in program)
    held = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(program), ctypes.addressof(held))
    _require(prctl(_SECCOMP, _FILTER, ctypes.c_char_p(header), 0, 0), "seccomp")


def _check(forbidden: Iterable[Path]) -> None:
    if landlock_version() >= 1:
        for path in forbidden:
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDONLY))
                raise UserError(f"{path}: in reach of the process that handles data")
    if _has_seccomp():
        with contextlib.suppress(OSError):
            socket.socket().close()
            raise UserError("the code that handles data can still open a network connection")


def _require(result: int, what: str) -> int:
    if result < 0:
        raise UserError(f"the sandbox could not be set up: {what} ({os.strerror(ctypes.get_errno())})")
    return result
