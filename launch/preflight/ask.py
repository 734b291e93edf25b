"""Asks every host, before a job starts, whether it can be reached and what it is like.

One process a host answers, started by the launcher that will start the job, or over ssh where that is the
launcher's way; all at once and within a time limit. Where MPI starts the job, MPI also brings the answers
together, so that hosts which it cannot connect are found before a job hangs there.
"""

import os
import re
import secrets
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from launch.model.plan import SHIM
from launch.model.text import printable
from launch.preflight.report import AnswerReader, HostReport, parse_answer

SSH_AT_ONCE = 128
"""More would need more open files than many systems allow (1,024)."""
_KEPT_BYTES = 16 << 10
"""Of what a command says on stderr, the last."""
_CHUNK_BYTES = 64 << 10
_LOOK_S = 0.1
_GRACE_S = 2.0
_MAX_REASON = 200

Way = Literal["lines", "mpi"]
"""How answers come home: each as lines of its own, or brought together by MPI as well."""


@dataclass(frozen=True)
class Round:
    """What one asking brought: a report a host, and why MPI did not connect those that answered."""

    reports: tuple[HostReport, ...]
    mpi_trouble: str | None = None


def new_nonce() -> str:
    """Draw the word that marks the lines of one probe."""
    return secrets.token_hex(8)


def build_worker(nonce: str, timeout_s: float, way: Way) -> tuple[str, ...]:
    """Build the argv of the process that answers on a host."""
    return (sys.executable, str(SHIM), "probe-host", nonce, str(max(1, round(timeout_s))), way)


def build_ssh(host: str, words: Sequence[str], timeout_s: float) -> list[str]:
    """Build the ssh command that runs a command of ours on a host.

    ssh hands its last word to the host's shell, so there, and only there, our own interpreter's and file's
    names are quoted for one. The host's name has been checked, and stands behind ``--``.
    """
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(timeout_s / 2))}"]
    return ["ssh", *options, "--", host, shlex.join(words)]


def ask_by_ssh(hosts: Sequence[str], timeout_s: float, at_once: int = SSH_AT_ONCE) -> tuple[HostReport, ...]:
    """Ask ``at_once`` hosts at a time; each has the whole of ``timeout_s``, from when it is asked."""
    stop = threading.Event()

    def ask(host: str) -> HostReport:
        nonce, end = new_nonce(), time.monotonic() + timeout_s
        argv = build_ssh(host, build_worker(nonce, timeout_s, "lines"), timeout_s)
        talk = _listen(argv, None, AnswerReader(nonce, 1), end, stop)
        return _read_talk(host, talk, timeout_s)

    with ThreadPoolExecutor(at_once) as pool:
        try:
            return tuple(pool.map(ask, hosts))
        except BaseException:
            stop.set()
            raise


def ask_by_launcher(
    argv: Sequence[str],
    environ: Mapping[str, str],
    hosts: Sequence[str],
    nonce: str,
    timeout_s: float,
    way: Way,
) -> Round:
    """Ask all hosts by one command that starts ``build_worker`` once on each.

    Args:
        argv: The launcher's command.
        environ: Its environment.
        hosts: In the order of the launcher's processes.
        nonce: What marks the answers.
        timeout_s: When to give up, in seconds.
        way: Whether MPI brings the answers together.
    """
    answers = AnswerReader(nonce, len(hosts))
    talk = _listen(argv, environ, answers, time.monotonic() + timeout_s, threading.Event())
    parsed = {rank: parse_answer(hosts[rank], content) for rank, content in answers.packed().items()}
    found = assign(hosts, parsed)
    missing = [host for host in hosts if host not in found]
    why = _reasons(missing, talk, timeout_s)
    reports = tuple(found.get(host) or HostReport(host, trouble=why[host]) for host in hosts)
    connected = way == "lines" or answers.gathered or answers.without_mpi
    return Round(reports, None if connected or missing else _why_not_mpi(talk, timeout_s))


def assign(hosts: Sequence[str], answers: Mapping[int, HostReport]) -> dict[str, HostReport]:
    """Each host's own answer, by host.

    Batch systems deal processes to hosts in an order of theirs, so a host is known by its name; where names
    do not tell (an address was given, or two answers carry one name), by the number of its process.

    Args:
        hosts: In the order in which the launcher was told of them.
        answers: By the number of the process.
    """
    by_label = {_label(host): host for host in hosts}
    named = {rank: _own_host(answer, by_label) for rank, answer in answers.items()}
    known = set(named.values())
    if None in known or len(known) < len(named) or len(by_label) < len(hosts):
        named = {rank: hosts[rank] for rank in answers}
    return {host: replace(answers[rank], host=host) for rank, host in named.items() if host is not None}


def _own_host(answer: HostReport, by_label: Mapping[str, str]) -> str | None:
    return next((by_label[label] for label in map(_label, answer.names) if label in by_label), None)


def _label(name: str) -> str:
    """Return the first word of a host name; an address as it is."""
    is_address = ":" in name or name.replace(".", "").isdigit()
    return name if is_address else name.partition(".")[0].lower()


@dataclass(frozen=True)
class _Talk:
    """How a command that asks hosts went. ``code`` None: it was ended because its time was over."""

    answers: AnswerReader
    said: tuple[str, ...]
    """The last lines of its stderr."""
    code: int | None

    def reason(self, timeout_s: float) -> str:
        """Why it did not bring what it should have."""
        if self.code is None:
            return f"no answer in {timeout_s:g} s"
        return self.said[-1] if self.said else f"it exited with code {self.code}"


def _listen(
    argv: Sequence[str],
    environ: Mapping[str, str] | None,
    answers: AnswerReader,
    end: float,
    stop: threading.Event,
) -> _Talk:
    """Run a command and take in its answers, until it ends, its time is over, or ``stop`` is set."""
    try:
        # A session of its own: it is ended with all that it has started, and Ctrl-C is ours alone.
        child = subprocess.Popen(
            list(argv),
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return _Talk(answers, (f"{argv[0]} cannot be run: {error.strerror}",), 127)
    try:
        said = _read_streams(child, answers, end, stop)
        with suppress(subprocess.TimeoutExpired):
            child.wait(0 if stop.is_set() else max(0.0, end - time.monotonic()))
        return _Talk(answers, _last_lines(said), child.poll())
    finally:
        _end(child)


def _read_streams(
    child: "subprocess.Popen[bytes]", answers: AnswerReader, end: float, stop: threading.Event
) -> bytes:
    """Read both streams to their ends; returns the last of stderr.

    What the command leaves behind (ssh's shared connection) may hold a stream open: once the command has
    ended and nothing more comes, that is its end.
    """
    said = b""
    with selectors.DefaultSelector() as selector:
        for stream in (child.stdout, child.stderr):
            selector.register(stream, selectors.EVENT_READ)  # type: ignore[arg-type]  # both are pipes
        while selector.get_map() and time.monotonic() < end and not stop.is_set():
            has_ended = child.poll() is not None
            ready = selector.select(_LOOK_S)
            for key, _ in ready:
                data = os.read(key.fd, _CHUNK_BYTES)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is child.stdout:
                    answers.feed(data)
                else:
                    said = (said + data)[-_KEPT_BYTES:]
            if has_ended and not ready:
                break
    return said


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End a command and all that it has started here; a launcher ends what it has started elsewhere."""
    for blow in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            break
        with suppress(ProcessLookupError):
            os.killpg(child.pid, blow)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()


def _read_talk(host: str, talk: _Talk, timeout_s: float) -> HostReport:
    content = talk.answers.packed().get(0)
    if content is not None:
        return parse_answer(host, content)
    if talk.code == 0:
        return HostReport(host, trouble="no topology in its answer; is lmsrun at the same path there?")
    return HostReport(host, trouble=talk.reason(timeout_s))


def _why_not_mpi(talk: _Talk, timeout_s: float) -> str:
    """MPI's own words begin with what is wrong, in lines of 80 characters, and go on for a page."""
    own = (place for place, line in enumerate(talk.said) if "MPI" in line and not line.startswith("lmsrun:"))
    start = next(own, None)
    if talk.code is None or start is None:
        return talk.reason(timeout_s)
    return " ".join(talk.said[start : start + 2])


def _reasons(missing: Sequence[str], talk: _Talk, timeout_s: float) -> dict[str, str]:
    """Why hosts did not answer; a line that names a host is about that host."""
    named = {
        host: line
        for host in missing
        for line in talk.said
        if re.search(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", line)
    }
    others = "it did not answer either" if named else talk.reason(timeout_s)
    return {host: named.get(host, others) for host in missing}


def _last_lines(said: bytes) -> tuple[str, ...]:
    lines = (printable(line, instead="").strip() for line in said.decode(errors="replace").splitlines())
    # Open MPI frames its messages.
    return tuple(line[:_MAX_REASON] for line in lines if line.strip("-"))
