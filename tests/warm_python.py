"""Runs Python programs in processes that have TensorFlow imported: each is forked from one that has.

Importing TensorFlow takes about four seconds of a processor, which is more than most of these programs need
for themselves. A *template* is a process that has imported TensorFlow and Keras and done nothing else: there
is no device yet, no thread of TensorFlow's runs, and Large Model Support is not imported. A program gets a
fork of it with its own arguments, environment, working directory and output, and ends as any process does.

What is read while TensorFlow is imported is the template's, so there is one for each environment, less the
variables of ``LATE``. The first program in an environment starts as usual, the second starts the template.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LATE = ("LMS", "TF_CPU_", "PYTEST_")
"""Prefixes of variables that nothing reads while TensorFlow is imported."""
MOST_TEMPLATES = 3
"""Limits how many templates are kept; each holds about 300 MiB."""
MOST_BYTES = 1 << 20
"""The largest request that a template takes."""

_Key = tuple[tuple[str, str], ...]


def run(
    argv: Sequence[str], environ: Mapping[str, str], timeout_s: float, cwd: "Path | str | None" = None
) -> "subprocess.CompletedProcess[str]":
    """Run a program as ``python *argv`` does; ``argv`` begins with a script, or with ``-c`` and its text.

    Raises ``subprocess.TimeoutExpired`` where it takes longer; its exit code is in what is returned.
    """
    kept = {name: text for name, text in environ.items() if not name.startswith(LATE)}
    if kept.get("TF_USE_LEGACY_KERAS") == "0":
        del kept["TF_USE_LEGACY_KERAS"]
    key = tuple(sorted(kept.items()))
    _asked[key] += 1
    if _asked[key] == 1 or (argv[0].startswith("-") and argv[0] != "-c"):
        return subprocess.run(
            [sys.executable, *argv],
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    return _template(key).run([*argv], {**environ}, timeout_s, str(cwd or Path.cwd()))


_asked: Counter[_Key] = Counter()
_templates: "dict[_Key, _Template]" = {}


def _template(key: _Key) -> "_Template":
    """Return the template of an environment, started where there is none; the one unused longest goes."""
    found = _templates.pop(key, None) or _Template(dict(key))
    _templates[key] = found
    if len(_templates) > MOST_TEMPLATES:
        _templates.pop(next(iter(_templates))).close()
    return found


@atexit.register
def close() -> None:
    """End all templates."""
    while _templates:
        _templates.popitem()[1].close()


class _Template:
    """A process that has imported TensorFlow, and forks itself when asked."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the template
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=self.said,
                stderr=self.said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        """End the process by closing what it listens to."""
        self.channel.close()
        self.process.wait()
        self.said.close()

    def run(
        self, argv: list[str], environ: dict[str, str], timeout_s: float, cwd: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run one program; see ``run`` of the module."""
        request = json.dumps({"argv": argv, "environ": environ, "cwd": cwd}).encode()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            told, theirs = os.pipe()
            try:
                socket.send_fds(self.channel, [request], [out.fileno(), err.fileno(), theirs])
            except ConnectionError as error:
                os.close(told)
                raise self._gone() from error
            finally:
                os.close(theirs)
            try:
                code = self._ended(told, timeout_s)
            finally:
                os.close(told)
            texts = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
        if code is None:
            raise subprocess.TimeoutExpired(argv, timeout_s, *texts)
        return subprocess.CompletedProcess([sys.executable, *argv], code, *texts)

    def _ended(self, told: int, timeout_s: float) -> "int | None":
        """Return the exit code of a program, or ``None`` where it took too long and was killed."""
        end, words = time.monotonic() + timeout_s, b""
        try:
            while words.count(b"\n") < 2:
                if not select.select([told], [], [], max(0, end - time.monotonic()))[0]:
                    return None
                if not (more := os.read(told, 64)):
                    raise self._gone()
                words += more
            return int(words.split()[1])
        finally:
            if words.count(b"\n") < 2:
                self._kill(told, words)

    def _gone(self) -> RuntimeError:
        """Return the error of a template that has ended, with what it said."""
        self.process.wait()
        self.said.seek(0)
        return RuntimeError(f"a template ended: {self.said.read()[-2000:].decode()}")

    def _kill(self, told: int, words: bytes) -> None:
        """Kill a program, which may not have started yet, and wait for its end."""
        while b"\n" not in words and (more := os.read(told, 64)):
            words += more
        if b"\n" in words:
            with suppress(ProcessLookupError):  # it has ended by itself meanwhile
                os.kill(int(words.split()[0]), signal.SIGKILL)
        while os.read(told, 64):
            pass


def _serve(channel: socket.socket) -> tuple[list[str], dict[str, str], str]:
    """Fork a process for each request, and return in it: its arguments, environment and working directory.

    A second fork in between waits for it and tells its number and its exit code.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, handles, *_ = socket.recv_fds(channel, MOST_BYTES, 3)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            break
        for handle in handles:
            os.close(handle)
    channel.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    out, err, told = handles
    if number := os.fork():
        os.close(out)
        os.close(err)
        os.write(told, f"{number}\n".encode())
        _, status = os.waitpid(number, 0)
        os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(told)
    for handle, standard in ((out, 1), (err, 2)):
        os.dup2(handle, standard)
        os.close(handle)
    asked = json.loads(request)
    return asked["argv"], asked["environ"], asked["cwd"]


def _start(channel: socket.socket) -> None:
    """Import TensorFlow, and become each program that is asked for."""
    import importlib
    import types

    sys.path.pop(0)  # the folder of this file
    for name in ("tensorflow", "tf_keras" if os.environ.get("TF_USE_LEGACY_KERAS") == "1" else "keras"):
        importlib.import_module(name)
    (first, *rest), environ, cwd = _serve(channel)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    program = types.ModuleType("__main__")
    if first == "-c":
        text, *rest = rest
        sys.path.insert(0, "")
        code = compile(text, "<string>", "exec")
    else:
        program.__dict__["__file__"] = first
        sys.path.insert(0, str(Path(first).parent))
        code = compile(Path(first).read_bytes(), first, "exec")
    sys.argv = [first, *rest]
    sys.modules["__main__"] = program
    exec(code, program.__dict__)  # noqa: S102 - a test's own program


if __name__ == "__main__":
    _start(socket.socket(fileno=int(sys.argv[1])))
