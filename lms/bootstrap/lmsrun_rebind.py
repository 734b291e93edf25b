"""Bind a rank of an elastic job anew, when Horovod has given it another place; Python 3.6 and later.

A rank that lives through a change of the job may find itself with more or fewer neighbours on its host.
``sitecustomize`` then loads this file: lmsrun's planner, in a process of its own, says where the rank now
belongs, and every thread of this process goes there. What the kernel cannot change from outside a thread is
its memory policy: the calling thread gets the new one (and with it every thread that it starts from now on),
threads that ran before keep theirs, and pages on nodes that the rank has left are moved.
"""

import ctypes
import json
import os
import subprocess

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "ppc64": 261, "s390x": 270}
_MIGRATE_PAGES = {"x86_64": 256, "aarch64": 238, "riscv64": 238, "ppc64le": 258, "ppc64": 258, "s390x": 287}
_MODES = {"none": 0, "preferred": 1, "bind": 2, "preferred-many": 5}
_MAX_NODES = 4096
_HERE = os.path.dirname(os.path.abspath(__file__))
_GLOO_TIMEOUT_S = 30
"""What Horovod waits for a peer unless HOROVOD_GLOO_TIMEOUT_SECONDS says otherwise."""
_ROUNDS = 20
_PLACE = (
    ("rank", "RANK", "HOROVOD_RANK"),
    ("size", "WORLD_SIZE", "HOROVOD_SIZE"),
    ("local_rank", "LOCAL_RANK", "HOROVOD_LOCAL_RANK"),
    ("local_size", "LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE"),
)


def read_place(environ: "Mapping[str, str]") -> "dict[str, int]":
    """Read the place that this rank was last bound for.

    Raises:
        KeyError: If the shim did not say.
        ValueError: If that is no number.
    """
    return {key: int(environ[ours]) for key, ours, _ in _PLACE}


def rebind(
    place: "dict[str, int]",
    environ: "MutableMapping[str, str]",
    read_binding: "Callable[[], dict[str, Any]]",
) -> "dict[str, Any]":
    """Bind this rank to the place that the planner now gives it, and verify the binding.

    Args:
        place: ``rank``, ``size``, ``local_rank`` and ``local_size`` as Horovod now says.
        environ: This process's; ``RANK`` and its like and ``LMSRUN_EXPECT`` follow the move.
        read_binding: Reads this thread's binding back from the kernel.

    Returns:
        What the receipt says: the place and the one before, the binding found, ``verified`` and reasons.
    """
    was, before = read_place(environ), json.loads(environ["LMSRUN_EXPECT"])
    content = dict(place, was=was, host=before["host"], gpu=before["gpu"])  # type: dict[str, Any]
    for key, ours, _ in _PLACE:
        environ[ours] = str(place[key])
    reasons, notes = [], []  # type: list[str], list[str]
    try:
        expected = ask_planner(place, environ)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        expected = dict(before, rank=place["rank"], local_rank=place["local_rank"])
        reasons.append("the planner gave no answer, the binding stays (" + " ".join(str(error).split()) + ")")
    else:
        reasons += apply(before, expected, environ, notes, Kernel())
        if expected["gpu"] != before["gpu"]:
            notes.append("its GPU stays: CUDA cannot change it once it runs")
    environ["LMSRUN_EXPECT"] = json.dumps(dict(expected, gpu=before["gpu"]))
    found = read_binding()
    reasons += compare(expected, found, read_threads())
    bound = bool(expected["cpus"]) or expected["mem_policy"] != "none"
    return dict(content, verified=bound and not reasons, reasons=reasons, notes=notes, **found)


def ask_planner(place: "dict[str, int]", environ: "Mapping[str, str]") -> "dict[str, Any]":
    """Have lmsrun plan this rank on this machine, as at its start.

    Raises:
        OSError: If it cannot be started.
        ValueError: If it has no answer.
    """
    told = json.loads(environ["LMSRUN_REPLAN"])
    asking = dict(planner_environ(environ), **{theirs: str(place[key]) for key, _, theirs in _PLACE})
    done = subprocess.run(  # noqa: UP022 - Python 3.6 has no capture_output
        told["ask"],
        env=asking,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=ask_timeout_s(environ),
        check=False,
    )
    if done.returncode:
        raise ValueError(done.stderr.decode(errors="replace")[-300:])
    answer = json.loads(done.stdout.decode())
    return {key: answer[key] for key in json.loads(environ["LMSRUN_EXPECT"])}


def planner_environ(environ: "Mapping[str, str]") -> "dict[str, str]":
    """Return the planner's environment.

    The planner is not a rank: it gets none of what is put in front of the user's interpreter.
    """
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(entry for entry in entries if os.path.realpath(entry) != _HERE or not entry)
    kept = {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
    return dict(kept, PYTHONPATH=path) if path else kept


def ask_timeout_s(environ: "Mapping[str, str]") -> float:
    """Return half of the time that the rank's peers wait for it before they give up."""
    text = environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "")
    return (int(text) if text.isdigit() and len(text) < 7 else _GLOO_TIMEOUT_S) / 2


class Kernel:
    """Moves this process."""

    def bind_threads(self, cpus: "set[int]") -> None:
        """Bind all threads, also those that are started meanwhile by one that is not bound yet.

        Raises:
            OSError: If the kernel refuses.
        """
        for _ in range(_ROUNDS):
            astray = [tid for tid, mask in read_threads().items() if mask != cpus]
            if not astray:
                return
            for tid in astray:
                try:
                    os.sched_setaffinity(tid, cpus)
                except ProcessLookupError:
                    continue

    def set_policy(self, policy: str, nodes: "set[int]") -> None:
        """Set this thread's memory policy.

        Raises:
            OSError: If the kernel refuses, or the call is not known on this machine.
        """
        _call(_SET_MEMPOLICY, ctypes.c_int(_MODES[policy]), _mask(nodes), ctypes.c_ulong(_MAX_NODES + 1))

    def migrate(self, old: "set[int]", new: "set[int]") -> str:
        """Move this process's pages, and return a line that says what was moved."""
        try:
            bits = ctypes.c_ulong(_MAX_NODES + 1)
            left = _call(_MIGRATE_PAGES, ctypes.c_int(0), bits, _mask(old), _mask(new))
        except OSError as error:
            return f"its pages stay where they are: {error.strerror}"
        return "its pages were moved" + (f", all but {left}" if left else "")


def apply(
    before: "dict[str, Any]",
    expected: "dict[str, Any]",
    environ: "Mapping[str, str]",
    notes: "list[str]",
    kernel: "Kernel",
) -> "list[str]":
    """Put every thread on the new CPUs, this one under the new policy, and pages on the new nodes."""
    reasons = []
    # A rank that is to be unbound gets what the ranks of this host have together.
    cpus = expected["cpus"] or json.loads(environ["LMSRUN_REPLAN"])["cpus"]
    try:
        kernel.bind_threads(parse_ids(cpus))
    except OSError as error:
        reasons.append(f"CPUs {cpus} cannot be had: {error.strerror}")
    old, new = parse_ids(before["mem_nodes"]), parse_ids(expected["mem_nodes"])
    if (old, before["mem_policy"]) == (new, expected["mem_policy"]):
        return reasons
    try:
        kernel.set_policy(expected["mem_policy"], new)
    except OSError as error:
        reasons.append(f"memory policy {expected['mem_policy']} cannot be had: {error.strerror}")
        return reasons
    notes.append("threads that ran before keep their memory policy")
    if new and old - new:
        notes.append(kernel.migrate(old - new, new))
    return reasons


def read_threads() -> "dict[int, set[int]]":
    """Read the CPU mask of every thread of this process."""
    masks = {}
    for name in os.listdir("/proc/self/task"):
        try:
            masks[int(name)] = set(os.sched_getaffinity(int(name)))
        except ProcessLookupError:
            continue
    return masks


def compare(
    expected: "dict[str, Any]", found: "dict[str, Any]", threads: "dict[int, set[int]]"
) -> "list[str]":
    """Return where the kernel's account differs from the plan."""
    reasons = []
    cpus = parse_ids(expected["cpus"])
    astray = sorted(tid for tid, mask in threads.items() if mask != cpus) if cpus else []
    if astray:
        reasons.append(f"{len(astray)} of {len(threads)} threads are not on CPUs {expected['cpus']}")
    planned = (expected["mem_policy"], expected["mem_nodes"])
    if planned[0] != "none" and (found["mem_policy"], found["mem_nodes"]) != planned:
        reasons.append(
            f"memory policy {found['mem_policy']} {found['mem_nodes']}, planned {planned[0]} {planned[1]}"
        )
    return reasons


def parse_ids(text: str) -> "set[int]":
    """Parse a list of ids: ``"0-2,8"`` becomes ``{0, 1, 2, 8}``."""
    ids = set()  # type: set[int]
    for run in filter(None, text.split(",")):
        low, _, high = run.partition("-")
        ids.update(range(int(low), int(high or low) + 1))
    return ids


def _mask(nodes: "set[int]") -> "Any":
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MAX_NODES // bits + 1))()
    for node in nodes:
        mask[node // bits] |= 1 << node % bits
    return mask


def _call(numbers: "dict[str, int]", *arguments: "Any") -> int:
    number = numbers.get(os.uname().machine)
    if number is None:
        raise OSError(0, "this system call is not known on " + os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


MYPY = False
if MYPY:
    from collections.abc import Callable, Mapping, MutableMapping
    from typing import Any
