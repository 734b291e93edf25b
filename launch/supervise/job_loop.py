"""The supervisor's loop: one thread, one poll, and whatever is due."""

import gc
import os
import signal
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

from launch.model.idset import format_ids
from launch.model.plan import LaunchPlan
from launch.receipts.judge import RankReceipt, read_leaving_before
from launch.supervise.children import Child, Children
from launch.supervise.job import JobFiles, JobOptions
from launch.supervise.rank_process import become_child, fork_process
from launch.supervise.receipt_display import ReceiptDisplay
from launch.supervise.rendezvous import Rendezvous
from launch.supervise.streams import (
    Console,
    RankStream,
    TaggedStream,
    open_consoles,
    open_pipe,
    poll,
    read_clock,
    read_last_lines,
)
from launch.supervise.termination import Termination
from launch.system.exit_status import describe_rank, describe_status, exit_code_of, signal_name
from launch.system.process_tree import signal_group, sweep

_SWEEP_LIMIT_S = 5.0
_SUSPECTS_HAVE_S = 3.0
"""How long a rank that began to exit before the one that failed may take to say its own exit code."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = {
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGTSTP: signal.SIGSTOP,
    signal.SIGCONT: signal.SIGCONT,
}
_TAG_COLOURS = (36, 33, 32, 35, 34, 31)


@dataclass(frozen=True)
class Ending:
    """Why the job ends, decided by the first thing that goes wrong."""

    exit_code: int
    line: str
    child: int | None = None
    """The child of ours whose end it is."""
    rank: int | None = None
    """The rank that failed, if it is known."""
    where: str = ""
    """`` on HOST``, if that rank keeps its output elsewhere."""


class JobLoop:
    """Runs one job inside the supervisor process. Use once."""

    def __init__(
        self,
        plan: LaunchPlan,
        options: JobOptions,
        children: Children,
        files: JobFiles,
        render_receipts: Callable[[Sequence[RankReceipt]], str],
        front: int,
        passed: set[signal.Signals],
    ) -> None:
        self._plan, self._options, self._children, self._files = plan, options, children, files
        self._front, self._handled = front, {*passed, signal.SIGTERM, signal.SIGCHLD}
        self._running: dict[int, Child] = {}
        self._statuses: dict[int, int] = {}
        self._streams: list[RankStream] = []
        self._out, self._err = open_consoles(options.stdout_fd, options.stderr_fd)
        self._ending: Ending | None = None
        self._childs_ending: Ending | None = None
        self._signalled: int | None = None
        self._interrupts = 0
        self._termination = Termination(options.grace_period_s, self._end_ranks)
        self._suspects: frozenset[int] = frozenset()
        self._receipts = ReceiptDisplay(plan, options, children, files, render_receipts, self._err)
        self._notes: list[str] = []

    @property
    def rank_failed(self) -> bool:
        """Whether the job ended because a rank (or the launcher of the ranks) failed by itself."""
        ending = self._ending
        is_childs = ending is not None and (ending is self._childs_ending or ending.rank is not None)
        return is_childs and self._signalled is None

    def run(self) -> int:
        """Start the ranks and stay until the last process of the job is gone."""
        wakeup = self._take_signals()
        self._rendezvous = Rendezvous(self._plan, self._note_from_thread, self._wake)
        for child in self._children.prepare(self._files, self._rendezvous):
            self._start(child)
        gc.enable()
        while self._running and not self._termination.given_up:
            self._turn(wakeup)
        return self._finish(wakeup)

    # Starting

    def _take_signals(self) -> int:
        """Have signals arrive as bytes on a pipe, so that none interrupts the work."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._alarm = writing
        for number in self._handled:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._handled)
        return reading

    def _start(self, child: Child) -> None:
        out, err = open_pipe(), open_pipe()
        parent = os.getpid()
        # A signal between fork and exec must meet the rank's own disposition, not the supervisor's handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._handled)
        pid = fork_process()
        if pid == 0:
            become_child(child, parent, (out[1], err[1]), self._handled, self._files)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(out[1])
        os.close(err[1])
        self._running[pid] = child
        self._add_stream(child.number, "stdout", out[0], self._out)
        self._add_stream(child.number, "stderr", err[0], self._err)
        self._note_if_verbose(f"{self._children.describe(child.number)} is process {pid}")

    def _add_stream(self, number: int, name: str, fd: int, console: Console) -> None:
        os.set_blocking(fd, False)
        mixed = self._children.mixed
        tags = mixed if self._options.tag_output is None else self._options.tag_output
        tag = self._tag(number, console) if tags else b""
        clock = read_clock if self._options.timestamps else None
        tagged = TaggedStream(tag, clock=clock) if tags or mixed or clock else None
        file_fd = self._files.output_fds.get((number, name))
        stream = RankStream(fd, console, tagged, file_fd, f"{self._children.names[number]}.{name}")
        stream.sieve = self._children.open_sieve(self._files)
        self._streams.append(stream)

    def _tag(self, rank: int, console: Console) -> bytes:
        width = len(str(self._plan.world_size - 1)) + 2
        tag = f"[{rank}]".ljust(width)
        if os.isatty(console.sink.fd) and "NO_COLOR" not in self._options.environ:
            return f"\x1b[{_TAG_COLOURS[rank % len(_TAG_COLOURS)]}m{tag}\x1b[0m ".encode()
        return f"{tag} ".encode()

    # Running

    def _turn(self, wakeup: int) -> None:
        """Wait for something, then do all that has come up."""
        ready = poll(self._readable(wakeup), self._writable(), self._next_due())
        if wakeup in ready:
            self._take_notice(os.read(wakeup, 4096))
        for stream in self._streams:
            if stream.open and stream.fd in ready:
                stream.pump()
                self._check_file(stream)
        self._pump_sinks(ready)
        if self._rendezvous.fileno() in ready:
            self._rendezvous.serve()
        while self._notes:
            self._note(self._notes.pop(0))
        self._look_at_receipts()
        self._end_waiting_in_vain()
        self._termination.advance()

    def _readable(self, wakeup: int) -> list[int]:
        fds = [stream.fd for stream in self._streams if stream.open and not stream.console.sink.full]
        if self._rendezvous.fileno() >= 0:
            fds.append(self._rendezvous.fileno())
        return [wakeup, *fds]

    def _writable(self) -> list[int]:
        return [console.sink.fd for console in self._consoles() if console.sink.waiting]

    def _consoles(self) -> list[Console]:
        return [self._out] if self._out is self._err else [self._out, self._err]

    def _next_due(self) -> float | None:
        due = [when for when in (self._termination.due, self._receipts.due) if when is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _pump_sinks(self, ready: set[int]) -> None:
        for console in self._consoles():
            if console.sink.fd not in ready or console.sink.error is not None:
                continue
            console.sink.pump()
            error: OSError | None = console.sink.error
            if error is None:
                continue
            if console.sink.closed_by_reader:
                self._end(Ending(128 + signal.SIGPIPE, ""), signal.SIGTERM)
            else:
                self._end(Ending(1, f"cannot write the ranks' output: {error.strerror}"), signal.SIGTERM)

    def _check_file(self, stream: RankStream) -> None:
        if stream.file_error is not None and stream.file_fd is not None:
            self._note(
                f"error: cannot write {stream.file_name}: {stream.file_error.strerror}; the file ends here"
            )
            os.close(stream.file_fd)
            stream.file_fd = None

    # Signals and endings

    def _take_notice(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _FORWARDED:
                self._signal_ranks(_FORWARDED[signal.Signals(number)])
            elif number in _ENDING:
                self._take_ending_signal(number)
        if os.getppid() != self._front:
            self._termination.hurry()
        self._reap()

    def _take_ending_signal(self, number: int) -> None:
        if os.getppid() != self._front:
            return
        self._suspects = frozenset()
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self._termination.hurry()
        elif self._signalled is None:
            self._signalled = number
            self._begin_to_end(number)
        else:
            self._signal_ranks(number)

    def _begin_to_end(self, number: int) -> None:
        if self._termination.is_set:
            # A termination that has begun keeps its deadline.
            self._note(f"{signal_name(number)}: passed on to the ranks, which are being ended already")
            self._signal_ranks(number)
            return
        self._note(
            f"{signal_name(number)}: passed on to the ranks; they have {self._options.grace_period_s:g} s"
        )
        self._termination.set(number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._running.pop(pid, None)
            if child is not None:
                self._child_ended(child.number, status)

    def _child_ended(self, number: int, status: int) -> None:
        self._statuses[number] = status
        how = f"{self._children.describe(number)} {describe_status(status)}"
        self._note_if_verbose(how)
        was_suspect = self._clear_suspect(number, status)
        if status == 0 or (self._ending is not None and not was_suspect):
            return
        code = exit_code_of(status)
        if self._signalled is not None:
            by_signal = os.WIFSIGNALED(status)
            name = signal_name(self._signalled)
            self._ending = Ending(128 + self._signalled if by_signal else code, f"ended by {name}; {how}")
            return
        self._childs_ending = ending = Ending(
            code, how + self._children.explain(number, status, self._files), number
        )
        if number in self._children.rank_statuses(self._statuses):
            self._childs_ending = ending = replace(ending, rank=number)
        if was_suspect:
            self._ending = ending
            return
        self._suspects = self._leaving_before(number, {other.number for other in self._running.values()})
        self._end(ending, signal.SIGTERM, _SUSPECTS_HAVE_S if self._suspects else 0)

    def _look_at_receipts(self, late: bool = False) -> None:
        refusal = self._receipts.look(self._statuses, late)
        if refusal is not None and self._ending is None and self._signalled is None:
            self._end(Ending(1, refusal), signal.SIGTERM)

    def _end_waiting_in_vain(self) -> None:
        """End ranks that wait in hvd.init() for one that is gone, long before Horovod's 30 s are over."""
        ended = self._children.rank_statuses(self._statuses)
        waiting = self._rendezvous.arrived - ended.keys()
        if not waiting or self._ending is not None or self._signalled is not None:
            return
        for rank in self._plan.ranks:
            if ended.get(rank.rank) == 0 and rank.rank not in self._rendezvous.arrived:
                line = f"{describe_rank(rank)} exited with code 0 before hvd.init(), where others wait for it"
                self._end(Ending(1, line), signal.SIGTERM)
                return

    def _clear_suspect(self, rank: int, status: int) -> bool:
        """Take note that a rank has ended; whether it may have begun the job's failure."""
        if rank not in self._suspects:
            return False
        others = self._suspects - {rank}
        self._suspects = others if status == 0 else self._leaving_before(rank, others)
        if not self._suspects:
            self._termination.set(signal.SIGTERM)
        return True

    def _leaving_before(self, rank: int, others: Set[int]) -> frozenset[int]:
        return read_leaving_before(self._files.receipt_dir, rank, others)

    def _end(self, ending: Ending, first_signal: int, delay_s: float = 0) -> None:
        """End the job for this reason, unless it is ending already."""
        if self._ending is None:
            self._ending = ending
        if not self._termination.is_set:
            self._termination.set(first_signal, delay_s)

    def _end_ranks(self, number: int) -> None:
        self._suspects = frozenset()  # From here on a rank's end is our doing.
        self._signal_ranks(number)

    def _signal_ranks(self, number: int) -> None:
        for pid in self._running:
            signal_group(pid, number)
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal_group(pid, signal.SIGCONT)

    # The end

    def _finish(self, wakeup: int) -> int:
        """Leave no process, no output and no reason behind."""
        left = sorted({*self._running, *sweep(_SWEEP_LIMIT_S)})
        self._rendezvous.stop()
        self._drain(wakeup)
        self._look_at_receipts(late=True)
        if left:
            self._note(f"error: processes {', '.join(map(str, left))} cannot be killed")
        code = self._conclude()
        self._receipts.conclude(code, self._statuses)
        code = code or int(self._receipts.lost)
        for console in self._consoles():
            self._flush(console, wakeup)
        return code

    def _conclude(self) -> int:
        """Say the last line and decide the exit code."""
        self._ask_for_first_failure()
        if self._ending is not None:
            if self._ending.line:
                self._repeat_last_lines(self._ending.child)
                early, where = self._say_left_early(self._ending.child), self._name_log(self._ending)
                self._note(self._ending.line + early + where)
            return self._ending.exit_code
        if self._signalled is not None:
            self._note(f"ended by {signal_name(self._signalled)}")
            return 0
        lost = self._receipts.lost or any(stream.file_error is not None for stream in self._streams)
        return 1 if lost else 0

    def _repeat_last_lines(self, failed: int | None) -> None:
        """Say once more what the rank that failed wrote last, if others have written since."""
        if failed is None or not self._children.mixed or self._options.quiet:
            return
        name = f"{self._children.names[failed]}.stderr"
        own = next(stream for stream in self._streams if stream.file_name == name)
        is_last = all(other.passed <= own.passed for other in self._streams if other.console is own.console)
        if not is_last and (lines := read_last_lines(own.last)):
            self._note("\n  ".join([f"the last lines of rank {failed} on stderr:", *lines]))

    def _name_log(self, ending: Ending) -> str:
        """Name the file that holds all of what the rank that failed wrote, if there is one."""
        if self._files.output_dir is None or ending.rank is None:
            return ""
        return f"; all it wrote is in {self._files.output_dir}/rank-{ending.rank}.stderr{ending.where}"

    def _say_left_early(self, failed: int | None) -> str:
        """Name the ranks that had left with 0 when one failed: a collective fails once a peer is gone."""
        if failed is None:
            return ""
        well = {number for number, status in self._statuses.items() if status == 0}
        left = sorted(self._leaving_before(failed, well))
        named = "rank" if len(left) == 1 else "ranks"
        return f", after {named} {format_ids(left)} had left with code 0" if left else ""

    def _ask_for_first_failure(self) -> None:
        """Name the rank that failed where its launcher did; the receipts know better than its exit code."""
        # A launcher that succeeded has coped with what failed, as an elastic job does. And what ended the job
        # from here (--numa strict, a reader that went away) is no news to be had from ranks that it killed.
        if self._ending is None or self._ending is not self._childs_ending or self._signalled is not None:
            return
        if failure := self._children.find_first_failure(self._files):
            rank = describe_rank(self._plan.ranks[failure.rank])
            where = "" if self._plan.ranks[failure.rank].host == "localhost" else f" on {failure.host}"
            self._ending = Ending(failure.exit_code, f"{rank} {failure.how}", rank=failure.rank, where=where)

    def _drain(self, wakeup: int) -> None:
        """Pass on what the ranks had written; a pipe that some outsider holds open is not waited for."""
        for stream in self._streams:
            while stream.open and stream.pump():
                self._check_file(stream)
                if stream.console.sink.full:
                    self._flush(stream.console, wakeup)
            stream.close()
        for console in self._consoles():
            console.finish()

    def _flush(self, console: Console, wakeup: int) -> None:
        """Wait for the reader of our output; if the user insists on the end, write only what goes at once."""
        while console.sink.waiting:
            ready = poll([wakeup], [console.sink.fd], 0 if self._termination.hurried else None)
            if wakeup in ready:
                self._take_notice(os.read(wakeup, 4096))
            if console.sink.fd in ready:
                self._pump_sinks({console.sink.fd})
            elif self._termination.hurried:
                return

    def _note(self, text: str) -> None:
        self._err.note(f"lmsrun: {text}")

    def _note_from_thread(self, text: str) -> None:
        self._notes.append(text)
        self._wake()

    def _wake(self) -> None:
        """Have the loop look around; from any thread."""
        with suppress(BlockingIOError):  # A full pipe wakes it too.
            os.write(self._alarm, b"\0")

    def _note_if_verbose(self, text: str) -> None:
        if self._options.verbose:
            self._note(text)
