"""Faults: kills, failures and signals against real jobs under every launcher, seeded and replayable.

    python bench/faults.py [--launchers local,openmpi,...] [--kinds ...] [--runs 20] [--seed 1] [--random N]
                           [--minutes M] [--json FILE]

Every run starts a job of two or three ranks, each with a daemon in a session of its own, waits until all are
ready, and does one thing to it. Looked at are the exit code, the time to the end (the grace period and two
seconds at most), the rank that the last line names, and what is left: processes (by a variable of theirs) and
folders. A run is known by its name, such as 1/openmpi/exit/3, from which its chances follow: ``--replay
1/openmpi/exit/3`` does it again. ``--random N`` adds N runs of any kind on the local launcher.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 4.0
BEYOND_S = 2.0
SAVE_S = 2.5
"""A checkpoint takes longer than Open MPI's own second, and less than the grace period."""
_READY_S = 90
_LEFT_S = 3
_MARK = "FAULT_MARK"
_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "RANK", "SLURM_PROCID")
RANK = f"""\
import os, signal, sys, time
folder, manner = sys.argv[1:]
rank = next(int(os.environ[name]) for name in {_NAMES!r} if name in os.environ)
def save(number, frame):
    time.sleep({SAVE_S})
    open(f"{{folder}}/saved-{{rank}}", "w").close()
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, dict(save=save, ignore=signal.SIG_IGN).get(manner, signal.SIG_DFL))
signal.signal(signal.SIGUSR1, lambda *_: open(f"{{folder}}/told-{{rank}}", "w").close())
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
with open(f"{{folder}}/draft-{{rank}}", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{{folder}}/draft-{{rank}}", f"{{folder}}/ready-{{rank}}")
while True:
    time.sleep(0.02)
    try:
        order = open(f"{{folder}}/order-{{rank}}").read()
    except OSError:
        continue
    if order:
        sys.exit(int(order))
"""
LAUNCHERS = {
    "local": (),
    "openmpi": ("--launcher", "mpirun", "--mpirun", "mpirun.openmpi"),
    "mpich": ("--launcher", "mpirun", "--mpirun", "mpirun.mpich"),
    "horovodrun": ("--launcher", "horovodrun"),
    "srun": ("--launcher", "srun"),
}


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    what: str
    manner: str = "die"
    """What ranks do when they are told to end: ``die``, ``save`` or ``ignore``."""
    signals: tuple[signal.Signals, ...] = ()
    """To lmsrun, one after the other."""
    to_rank: signal.Signals | None = None
    exits: bool = False
    """Whether a rank exits with a code."""
    kills: tuple[str, ...] = ()
    """Which of lmsrun's own processes are killed."""


TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
KINDS = {
    "exit": Kind("a rank exits with a code", exits=True),
    "segv": Kind("a rank dies of SIGSEGV", to_rank=signal.SIGSEGV),
    "abort": Kind("a rank dies of SIGABRT", to_rank=signal.SIGABRT),
    "kill": Kind("a rank is killed", to_rank=signal.SIGKILL),
    "exit-save": Kind("a rank fails, the others save", "save", exits=True),
    "kill-ignore": Kind("a rank is killed, the others ignore SIGTERM", "ignore", to_rank=signal.SIGKILL),
    "term": Kind("SIGTERM", signals=(TERM,)),
    "int": Kind("SIGINT", signals=(INT,)),
    "hup": Kind("SIGHUP", signals=(HUP,)),
    "term-save": Kind("SIGTERM, all save and leave with 0", "save", signals=(TERM,)),
    "int-int": Kind("SIGINT twice, ranks ignore it", "ignore", signals=(INT, INT)),
    "usr1-term": Kind("SIGUSR1, then SIGTERM", signals=(USR1, TERM)),
    "stop-term": Kind("a rank is stopped, then SIGTERM", signals=(TERM,), to_rank=signal.SIGSTOP),
    "front": Kind("the command is killed", kills=("front",)),
    "both": Kind("command and supervisor are killed at once", kills=("front", "supervisor")),
}


@dataclass
class Result:
    """How one run went; empty texts are good."""

    name: str
    code: int | None
    expected: int
    took_s: float
    wrong: list[str]


class Run:
    """One job and its fault."""

    def __init__(self, name: str, before: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name = name
        _, self.launcher, kind, _ = name.split("/")
        self.kind = KINDS[kind]
        chance = random.Random(name)  # noqa: S311 - replayable, not secret
        self.ranks = 2 if self.launcher == "srun" else chance.choice((2, 3))
        self.victim = chance.randrange(self.ranks)
        self.code = chance.choice((1, 3, 7, 42, 255))
        self.delay_s = chance.choice((0.0, chance.uniform(0, 0.3)))
        self.before, self.environ = before, environ

    def do(self) -> Result:
        """Start the job, do it, and look."""
        with tempfile.TemporaryDirectory(prefix="fault-") as folder:
            self.folder = Path(folder)
            (self.folder / "rank.py").write_text(RANK)
            job = self._start()
            try:
                pids = self._wait_ready(job)
                time.sleep(self.delay_s)
                begin = time.monotonic()
                if not self._strike(pids):
                    return Result(self.name, None, 0, 0, ["it was not told of SIGUSR1"])
                return self._judge(job, begin)
            except TimeoutError as error:
                return Result(self.name, None, 0, 0, [str(error)])
            finally:
                for pid in self._left():
                    _kill(pid, signal.SIGKILL)
                job.kill()
                job.communicate()

    def _start(self) -> "subprocess.Popen[bytes]":
        mark = f"{_MARK}={self.folder.name}"
        root = ("--allow-run-as-root",) if self.launcher == "openmpi" and os.geteuid() == 0 else ()
        options = (
            *LAUNCHERS[self.launcher],
            *root,
            "--numa",
            "off",
            "-np",
            str(self.ranks),
            "--oversubscribe",
        )
        argv = [
            *(*self.before, "sh", "-c", 'echo $$ >pid; exec "$@"', "sh"),
            *(sys.executable, str(ROOT / "lmsrun" / "__main__.py"), "run", *options),
            *(
                "--grace-period",
                str(GRACE_S),
                "-x",
                mark,
                "--",
                "rank.py",
                str(self.folder),
                self.kind.manner,
            ),
        ]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LMS", "SLURM_"))}
        own = {_MARK: self.folder.name, "TMPDIR": str(self.folder), "OMPI_MCA_mpi_yield_when_idle": "1"}
        return subprocess.Popen(
            argv,
            cwd=self.folder,
            env={**kept, **self.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def _wait_ready(self, job: "subprocess.Popen[bytes]") -> dict[int, int]:
        end = time.monotonic() + _READY_S
        while time.monotonic() < end and job.poll() is None:
            ready = {rank: self.folder / f"ready-{rank}" for rank in range(self.ranks)}
            if all(path.exists() for path in ready.values()):
                return {rank: int(path.read_text()) for rank, path in ready.items()}
            time.sleep(0.02)
        raise TimeoutError("the ranks did not start")

    def _strike(self, pids: Mapping[int, int]) -> bool:
        kind, front = self.kind, int((self.folder / "pid").read_text())
        own = {"front": front}
        if "supervisor" in kind.kills:
            own["supervisor"] = only_child(only_child(front))
        for name in kind.kills:
            _kill(own[name], signal.SIGKILL)
        if kind.exits:
            (self.folder / f"order-{self.victim}").write_text(str(self.code))
        if kind.to_rank is not None:
            _kill(pids[self.victim], kind.to_rank)
        while kind.to_rank == signal.SIGSTOP and not _is_stopped(pids[self.victim]):
            time.sleep(0.01)  # The kernel stops a process when it runs next.
        for number in kind.signals:
            _kill(front, number)
            end = time.monotonic() + 10
            while number == USR1 and len(list(self.folder.glob("told-*"))) < self.ranks:
                if time.monotonic() > end:
                    return False
                time.sleep(0.02)
            time.sleep(0.2 if len(kind.signals) > 1 else 0)
        return True

    def _judge(self, job: "subprocess.Popen[bytes]", begin: float) -> Result:
        wrong = []
        try:
            _, said = job.communicate(timeout=GRACE_S + BEYOND_S + 15)
        except subprocess.TimeoutExpired:
            return Result(self.name, None, self._expected(), 0, ["it hangs"])
        took_s = time.monotonic() - begin
        lines = [line for line in said.decode(errors="replace").splitlines() if line.startswith("lmsrun: ")]
        last = lines[-1] if lines else ""
        code = 128 - job.returncode if job.returncode < 0 else job.returncode
        if code != self._expected() and not (self.before and self.kind.kills):
            wrong.append(f"code {code} for {self._expected()}: {last}")
        if took_s > GRACE_S + BEYOND_S:
            wrong.append(f"it took {took_s:.1f} s")
        if (self.kind.exits or self.kind.to_rank) and f"rank {self.victim} " not in last:
            wrong.append(f"not named: {last}")
        savers = set(range(self.ranks)) - ({self.victim} if self.kind.exits else set())
        saved = {int(path.name.partition("-")[2]) for path in self.folder.glob("saved-*")}
        if self.kind.manner == "save" and saved != savers:
            wrong.append(f"saved {sorted(saved)} of {sorted(savers)}")
        end = time.monotonic() + _LEFT_S
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.05)
        folders = [path.name for path in self.folder.glob("lmsrun-*")]
        if left or folders:
            wrong.append(f"left: processes {left}, folders {folders}")
        return Result(self.name, code, self._expected(), took_s, wrong)

    def _expected(self) -> int:
        kind = self.kind
        if kind.kills:
            return 137
        if kind.exits:
            return self.code
        if kind.signals:
            return 0 if kind.manner == "save" else 128 + kind.signals[-1]
        assert kind.to_rank is not None
        return 128 + kind.to_rank

    def _left(self) -> list[int]:
        wanted = f"{_MARK}={self.folder.name}".encode()
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found


def only_child(pid: int) -> int:
    """Find the only child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def names(asked: argparse.Namespace) -> Iterator[str]:
    """Yield the names of all runs, one round of all kinds and launchers after the other."""
    if asked.replay:
        yield asked.replay
        return
    for number in range(asked.runs):
        for launcher in asked.launchers.split(","):
            yield from (f"{asked.seed}/{launcher}/{kind}/{number}" for kind in asked.kinds.split(","))
    chance = random.Random(asked.seed)  # noqa: S311 - replayable, not secret
    for number in range(asked.random):
        yield f"{asked.seed}/local/{chance.choice(list(KINDS))}/r{number}"


def render(results: Sequence[Result]) -> str:
    """Render a row for each kind: runs that went well of all, by launcher."""
    launchers = list(dict.fromkeys(result.name.split("/")[1] for result in results))
    lines = [f"| fault | {' | '.join(launchers)} |", f"| --- |{' --- |' * len(launchers)}"]
    for kind, about in KINDS.items():
        cells = []
        for launcher in launchers:
            own = [each for each in results if each.name.split("/")[1:3] == [launcher, kind]]
            cells.append(f"{sum(not each.wrong for each in own)} of {len(own)}" if own else "-")
        lines.append(f"| {about.what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Run what was asked for; returns 1 when anything went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay")
    parser.add_argument("--minutes", type=float, default=600, help="start no run after so long")
    parser.add_argument("--json")
    asked = parser.parse_args()
    # A shell starts its background jobs with SIGINT ignored, nohup with SIGHUP; lmsrun keeps to that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    end, results = time.monotonic() + 60 * asked.minutes, []
    with ExitStack() as stack:
        environ: Mapping[str, str] = {}
        before: tuple[str, ...] = ()
        for name in names(asked):
            if time.monotonic() > end:
                break
            if "/srun/" in name and not before:
                environ = _start_slurm(stack)
                before = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1")
            is_srun = "/srun/" in name
            result = Run(name, before if is_srun else (), environ if is_srun else {}).do()
            results.append(result)
            if result.wrong:
                print(f"{name}: {'; '.join(result.wrong)}", flush=True)
            if asked.json:
                Path(asked.json).write_text(json.dumps([asdict(each) for each in results], indent=1))
    print(render(results))
    print(f"{sum(not each.wrong for each in results)} of {len(results)} runs went as they must")
    return int(any(each.wrong for each in results))


def _start_slurm(stack: ExitStack) -> Mapping[str, str]:
    """Start a Slurm of two nodes, the tests' own."""
    sys.path.insert(0, str(ROOT / "tests" / "cluster"))
    from slurm_cluster import SlurmCluster

    folder = Path(tempfile.mkdtemp(prefix="fault-slurm-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    environ: Mapping[str, str] = stack.enter_context(SlurmCluster(folder)).environ
    return environ


if __name__ == "__main__":
    sys.exit(main())
