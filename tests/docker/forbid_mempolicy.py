"""Become a program that the kernel refuses memory policies, as Docker does without CAP_SYS_NICE.

Usage: ``python forbid_mempolicy.py PROGRAM ARGS...``. A seccomp filter answers EPERM to the four system calls
that Docker's default profile ties to CAP_SYS_NICE (get_mempolicy, mbind, set_mempolicy,
set_mempolicy_home_node), and to move_pages. Needs no privilege: a process may always give up more.
"""

import ctypes
import errno
import os
import struct
import sys

ARCHITECTURES = {
    "x86_64": (0xC000003E, (239, 237, 238, 450, 279)),
    "aarch64": (0xC00000B7, (236, 235, 237, 450, 239)),
}
"""Machine -> (its AUDIT_ARCH of include/uapi/linux/audit.h, the numbers of the five system calls)."""

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
"""include/uapi/linux/prctl.h, seccomp.h and bpf_common.h of the Linux kernel."""


def program(architecture: int, numbers: tuple[int, ...]) -> bytes:
    """The filter: another architecture's calls pass, those of ``numbers`` are refused, the rest passes."""
    steps = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 0, len(numbers) + 1, architecture), (LOAD, 0, 0, 0)]
    for index, number in enumerate(numbers):
        steps.append((JUMP_IF_EQUAL, len(numbers) - index, 0, number))
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def forbid() -> None:
    """Install the filter in this process; its children and what it becomes keep it."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = program(*ARCHITECTURES[os.uname().machine])
    held = ctypes.create_string_buffer(code, len(code))

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]

    table = Filter(len(code) // 8, ctypes.addressof(held))
    for call in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(table), 0, 0),
    ):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), f"prctl {call[0]} was refused")


if __name__ == "__main__":
    forbid()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - becoming that program is the point
