"""Hands a job's environment to other hosts where its launcher would write it on command lines.

A process on each host, started over ssh, takes the text from its standard input, which nobody else can
read, keeps it in a private file for the ranks of that host, and removes it when its input ends: with the job,
or with lmsrun itself, however that ends.
"""

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.model.errors import JobError, UsageError
from launch.model.plan import SHIM
from launch.model.text import printable
from launch.preflight.ask import build_ssh

COMMAND = "hold-environment"
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_HELD = "environment held in "
_MAX_BYTES = 16 << 20
_LEAVE_S = 5.0
_SHARED_S = 2.0
"""How long another host of the job may take to write the file into a folder that both have."""


@contextmanager
def endings_raised() -> Iterator[None]:
    """Have signals that end this process raise ``SystemExit`` in the block, so that files go with it.

    While ranks run their supervisor takes these signals.
    """
    ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def hold_environment(hosts: Sequence[str], path: str, text: str, timeout_s: float) -> Iterator[None]:
    """Have a file on other hosts for as long as the block runs.

    Args:
        hosts: Their names, checked.
        path: Of the file, in a folder that is not there yet and whose name nobody can guess.
        text: One line.
        timeout_s: How long they may take together.

    Raises:
        JobError: Naming a host where that cannot be.
    """
    children: list[subprocess.Popen[bytes]] = []
    try:
        for host in hosts:
            children.append(_start(host, path, timeout_s))
        for child in children:
            with suppress(BrokenPipeError):
                child.stdin.write(text.encode("ascii") + b"\n")  # type: ignore[union-attr]  # it is a pipe
                child.stdin.flush()  # type: ignore[union-attr]
        end = time.monotonic() + timeout_s
        for host, child in zip(hosts, children, strict=True):
            if why := _wait_until_held(child, path, end):
                raise JobError(f"cannot hand the environment to {host}: {why}; try --launcher mpirun")
        yield
    finally:
        _leave(children)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Be the process on the other host.

    Raises:
        UsageError: If the text does not come, or the file cannot be.
    """
    del environ
    is_asked = len(argv) == 1 and os.path.isabs(argv[0]) and not sys.stdin.isatty()
    text = sys.stdin.buffer.readline(_MAX_BYTES) if is_asked else b""
    if not text.endswith(b"\n"):
        raise UsageError(f"{COMMAND} is what lmsrun starts on other hosts; see lmsrun --help")
    path = Path(argv[0])
    # A connection that is lost ends the input as well.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    is_ours = _write(path, text.rstrip(b"\n"))
    try:
        print(f"{_HELD}{path}", flush=True)
        sys.stdin.buffer.read()
    finally:
        if is_ours:
            shutil.rmtree(path.parent, ignore_errors=True)
    return 0


def _write(path: Path, text: bytes) -> bool:
    """Write the file; returns whether it is ours to remove: hosts may share the folder that it is in."""
    try:
        path.parent.mkdir(mode=0o700)
    except FileExistsError:
        end = time.monotonic() + _SHARED_S
        while not (path.is_file() and path.read_bytes() == text):
            if time.monotonic() > end:
                raise UsageError(f"{path.parent} is there already, and is not this job's") from None
            time.sleep(0.02)
        return False
    except OSError as error:
        raise UsageError(f"cannot make {path.parent}: {error.strerror}") from error
    path.write_bytes(text)
    return True


def _start(host: str, path: str, timeout_s: float) -> "subprocess.Popen[bytes]":
    argv = build_ssh(host, (sys.executable, str(SHIM), COMMAND, path), timeout_s)
    try:
        # A session of its own: Ctrl-C is for the ranks, which may still need the file.
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise JobError(f"cannot run ssh: {error.strerror}; try --launcher mpirun") from error


def _wait_until_held(child: "subprocess.Popen[bytes]", path: str, end: float) -> str:
    """Wait until a host has the file; returns why it has not, if so."""
    said = {"out": b"", "err": b""}
    with selectors.DefaultSelector() as selector:
        for name, stream in (("out", child.stdout), ("err", child.stderr)):
            selector.register(stream, selectors.EVENT_READ, name)  # type: ignore[arg-type]  # both are pipes
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if not (data := os.read(key.fd, 4096)):
                    selector.unregister(key.fileobj)
                said[key.data] = (said[key.data] + data)[-65536:]
            # A login shell may say something, too.
            if f"{_HELD}{path}\n".encode() in said["out"]:
                return ""
    lines = str(said["err"], errors="replace").strip().splitlines()
    return printable(lines[-1][:200]) if lines else "no answer in time"


def _leave(children: "Sequence[subprocess.Popen[bytes]]") -> None:
    """End the input of all, then see that they go."""
    for child in children:
        with suppress(OSError):
            child.stdin.close()  # type: ignore[union-attr]  # all three are pipes
    end = time.monotonic() + _LEAVE_S
    for child in children:
        try:
            child.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for stream in (child.stdout, child.stderr):
            stream.close()  # type: ignore[union-attr]
