"""The supervisor's loop: one thread, one poll, and whatever is due."""

import gc
import os
import signal
import stat
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress

from launch.channel.events import Carried, Ended, Ending, Joined, Lost
from launch.channel.messages import STREAMS
from launch.ending.device_memory import explain_lack_of_memory
from launch.ending.job_end import JobEnd, Verdict
from launch.ending.stall import StallWatch, name_culprits
from launch.model.idset import format_ids
from launch.model.plan import LaunchPlan
from launch.receipts.judge import RankReceipt, read_leaving_before
from launch.supervise.children import Child, Children
from launch.supervise.job import JobFiles, JobOptions
from launch.supervise.lingering import LeftBehind, Lingering
from launch.supervise.rank_process import become_child, fork_process
from launch.supervise.receipt_display import ReceiptDisplay
from launch.supervise.receipt_watch import Outcome
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
from launch.system.exit_status import describe_rank, describe_status, signal_name
from launch.system.process_load import Load, read_load
from launch.system.process_tree import reap_children, signal_group, sweep

_SWEEP_LIMIT_S = 5.0
_QUIET_S = 10.0
"""How long after the last output ranks that wait for another wait for something that goes wrong."""
_UNDERWAY_S = 5.0
"""Limits how long output that was sent over a network may take to come."""
_PAUSE_S = 1.0
"""Readers of our output that are slow may pause for so long, also where ranks have no time to end."""
_STALLED = 124
"""The code of a job that was ended because it stood still, as ``timeout`` has it."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = {
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGTSTP: signal.SIGSTOP,
    signal.SIGCONT: signal.SIGCONT,
}
_KEPT_LINES = 12
"""Of the rank that failed, in ``receipts.json``."""
_TAG_COLOURS = (36, 33, 32, 35, 34, 31)


class JobLoop:
    """Runs one job inside the supervisor process. Use once."""

    def __init__(
        self,
        plan: LaunchPlan,
        options: JobOptions,
        children: Children,
        files: JobFiles,
        render_receipts: Callable[[Sequence[RankReceipt]], str],
        above: tuple[int, int],
        passed: set[signal.Signals],
    ) -> None:
        """Take a job.

        Args:
            plan: What to start.
            options: How to supervise it.
            children: What is started.
            files: What the job has on disk.
            render_receipts: Makes the table of receipts.
            above: A pipe that ends when the front does, and the guard, our parent.
            passed: The signals that the front passes on.
        """
        self._plan, self._options, self._children, self._files = plan, options, children, files
        (self._front, self._guard), self._handled = above, {*passed, signal.SIGTERM, signal.SIGCHLD}
        self._pids: dict[int, int] = {}
        self._lingering = Lingering()
        self._left_behind: LeftBehind | None = None
        self._streams: list[RankStream] = []
        self._out, self._err = open_consoles(options.stdout_fd, options.stderr_fd, options.words_fd)
        self._has_launcher = options.command is not None
        grace_s, elastic = options.grace_period_s, children.elastic
        self._end = JobEnd(plan.world_size, self, grace_s, time.monotonic, self._has_launcher, elastic)
        self._stall = StallWatch(options.stall_timeout_s, time.monotonic)
        self._culprits = ""
        self._is_held = False
        self._receipts = ReceiptDisplay(plan, options, children, files, render_receipts, self._err)
        self._notes: list[str] = []
        self._whys: dict[int, str] = {}

    @property
    def rank_failed(self) -> bool:
        """Whether the job ended because a rank or the launcher failed by itself, or as it stood still."""
        verdict = self._end.verdict
        if verdict is None or self._end.signalled is not None:
            return False
        return verdict.of_launcher or verdict.rank is not None or verdict.exit_code == _STALLED

    def run(self) -> int:
        """Start the ranks and stay until the last process of the job is gone."""
        wakeup = self._take_signals()
        self._rendezvous = Rendezvous(self._plan, self._note_from_thread, self._wake)
        for child in self._children.prepare(self._files, self._rendezvous):
            self._start(child)
        gc.enable()
        while not self._end.over:
            self._turn(wakeup)
        self._end_left_behind(wakeup)
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
        self._pids[child.number] = pid
        if not self._has_launcher:
            self._end.rank_started(child.number)
        for name, (fd, _) in zip(STREAMS, (out, err), strict=True):
            self._add_stream(child.number, name, fd, is_launchers=self._has_launcher)
        described = self._children.describe(None if self._has_launcher else child.number)
        self._note_if_verbose(f"{described} is process {pid}")

    def _add_stream(self, number: int, name: str, fd: int, is_launchers: bool) -> None:
        """Take in a stream of a rank, or of the launcher, which has tags of its own for what it passes on."""
        os.set_blocking(fd, False)
        console = self._out if name == STREAMS[0] else self._err
        mixed = self._children.mixed
        tags = mixed if self._options.tag_output is None else self._options.tag_output
        tag = self._tag(number, console) if tags and not is_launchers else b""
        clock = read_clock if self._options.timestamps else None
        tagged = TaggedStream(tag, clock=clock) if tag or mixed or clock else None
        is_child = is_launchers or not self._has_launcher
        file_fd = self._files.output_fds.get((number, name)) if is_child else None
        named = self._children.names[number] if is_child else f"rank-{number}"
        stream = RankStream(fd, console, tagged, file_fd, f"{named}.{name}")
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
        for rank, status in self._lingering.ended():
            self._end.rank_ended(rank, status)
        if self._front in ready:
            self._front_is_gone()
        for stream in self._streams:
            if stream.open and stream.fd in ready and not stream.console.sink.full:
                stream.pump()
                self._stall.progress()
                self._check_file(stream)
        self._pump_sinks(ready)
        if self._rendezvous.fileno() in ready:
            self._rendezvous.serve()
        self._hear_ranks(ready)
        while self._notes:
            self._note(self._notes.pop(0))
        self._look_at_receipts()
        self._end_waiting_in_vain()
        self._look_for_stall()
        self._end.advance()

    def _readable(self, wakeup: int) -> list[int]:
        fds = [stream.fd for stream in self._streams if stream.open and not stream.console.sink.full]
        if self._rendezvous.fileno() >= 0:
            fds.append(self._rendezvous.fileno())
        channel = self._children.channel
        above = [self._front] if self._front >= 0 else []
        return [wakeup, *above, *fds, *(channel.filenos() if channel is not None else ())]

    def _writable(self) -> list[int]:
        return [console.sink.fd for console in self._consoles() if console.sink.waiting]

    def _consoles(self) -> list[Console]:
        return [self._out] if self._out is self._err else [self._out, self._err]

    def _next_due(self) -> float | None:
        all_due = [self._end.due, self._receipts.due, self._stall.due, self._lingering.due]
        if self._left_behind is not None:
            all_due.append(self._left_behind.due)
        due = [when for when in all_due if when is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _pump_sinks(self, ready: set[int]) -> None:
        for console in self._consoles():
            if console.sink.fd not in ready or console.sink.error is not None:
                continue
            console.sink.pump()
            error: OSError | None = console.sink.error
            if error is None:
                continue
            if self._end.signalled is not None:
                continue  # a terminal that hung up
            if console.sink.closed_by_reader:
                self._end.end(Verdict(128 + signal.SIGPIPE, ""), signal.SIGTERM)
            else:
                line = f"cannot write the ranks' output: {error.strerror}"
                self._end.end(Verdict(1, line), signal.SIGTERM)

    def _check_file(self, stream: RankStream) -> None:
        if stream.file_error is not None and stream.file_fd is not None:
            self._note(
                f"error: cannot write {stream.file_name}: {stream.file_error.strerror}; the file ends here"
            )
            os.close(stream.file_fd)
            stream.file_fd = None

    # Events

    def _take_notice(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _FORWARDED:
                self._stall.progress()
                self._is_held = number == signal.SIGTSTP or (self._is_held and number != signal.SIGCONT)
                self._end.pass_on(_FORWARDED[signal.Signals(number)])
            elif number in _ENDING and os.getppid() == self._guard:
                self._culprits = self._culprits or self._name_culprits()
                self._end.take_ending_signal(number)
        if os.getppid() != self._guard:
            self._end.abandon("")  # The front says why.
        self._reap()

    def _front_is_gone(self) -> None:
        os.close(self._front)
        self._front = -1
        self._end.abandon("lmsrun itself was killed; the job was ended")

    def _reap(self) -> None:
        numbers = {pid: number for number, pid in self._pids.items()}
        for pid, status in reap_children():
            if pid in numbers:
                self._child_ended(numbers[pid], status)

    def _child_ended(self, number: int, status: int) -> None:
        pid = self._pids.pop(number)
        rank = None if self._has_launcher else number
        self._note_if_verbose(self.describe_end(rank, status))
        if rank is not None:
            if not (self._end.is_ending and self._lingering.take(rank, pid, status)):
                self._end.rank_ended(rank, status)
            return
        self._hear_ranks(poll(self._channel_filenos(), [], 0))  # What they said before it ended.
        self._end.launcher_ended(status)

    def _hear_ranks(self, ready: Set[int]) -> None:
        """Take in what ranks of another launcher tell."""
        channel = self._children.channel
        if channel is None:
            return
        for event in channel.serve(ready & set(channel.filenos())):
            match event:
                case Joined(rank):
                    self._end.rank_started(rank)
                case Ending(rank):
                    self._end.launcher_ends_rank(rank)
                case Ended(rank, status, why):
                    self._whys[rank] = why
                    self._note_if_verbose(self.describe_end(rank, status))
                    self._end.rank_ended(rank, status)
                case Lost(rank):
                    self._end.rank_lost(rank)
                case Carried(rank, name, fd):
                    self._add_stream(rank, name, fd, is_launchers=False)

    def _channel_filenos(self) -> list[int]:
        return self._children.channel.filenos() if self._children.channel is not None else []

    def _look_at_receipts(self, late: bool = False) -> None:
        refusal = self._receipts.look(self._end.statuses, late)
        if refusal is not None and self._end.verdict is None and self._end.signalled is None:
            self._end.end(Verdict(1, refusal), signal.SIGTERM)

    def _end_waiting_in_vain(self) -> None:
        """End ranks that wait in hvd.init() for one that is gone, long before Horovod's 30 s are over."""
        ended = self._end.statuses
        waiting = self._rendezvous.arrived - ended.keys()
        if not waiting or self._end.verdict is not None or self._end.signalled is not None:
            return
        for rank in self._plan.ranks:
            if ended.get(rank.rank) == 0 and rank.rank not in self._rendezvous.arrived:
                line = f"{describe_rank(rank)} exited with code 0 before hvd.init(), where others wait for it"
                self._end.end(Verdict(1, line), signal.SIGTERM)
                return

    def _look_for_stall(self) -> None:
        """Say that the job stands still, or end it, as was asked."""
        if self._is_held or self._end.is_ending or self._children.elastic:
            return
        stall = self._stall.look(self._read_loads, self._end.running, self._rendezvous.arrived)
        if stall is None:
            return
        if self._options.stall_kill and stall.is_sure:
            self._end.end(Verdict(_STALLED, f"{stall.line}; ended by --stall-kill"), signal.SIGTERM)
        else:
            self._note(f"warning: {stall.line}")

    def _read_loads(self) -> dict[int, Load]:
        """Read what the ranks on this host are at; those elsewhere have told it."""
        channel = self._children.channel
        pids, told = (self._pids, {}) if channel is None else (channel.programs, channel.loads())
        found = told | {rank: load for rank, pid in pids.items() if (load := read_load(pid)) is not None}
        return {rank: load for rank, load in found.items() if rank in self._end.running}

    def _name_culprits(self, failed: int | None = None) -> str:
        """Name the ranks that others wait for; in ``hvd.init()`` only when that goes wrong."""
        arrived = self._rendezvous.arrived
        is_clear = failed in arrived if failed is not None else self._stall.quiet_s > _QUIET_S
        ranks = self._end.running | ({failed} if failed is not None else set())
        named = name_culprits(ranks, self._read_loads(), arrived if is_clear else set())
        if self._children.channel is not None:
            self._children.channel.forget_loads()  # What is told next answers the signal that ends the job.
        return named

    # Orders of ``JobEnd``

    def signal_rank(self, rank: int, number: int) -> None:
        """See ``Orders``."""
        if self._children.channel is not None:
            self._children.channel.signal(rank, number)
        elif rank in self._pids:
            _signal_all_of(self._pids[rank], number)
        else:
            self._lingering.signal(rank, number)

    def signal_launcher(self, number: int) -> None:
        """See ``Orders``; no launcher cleans up at a SIGQUIT."""
        for pid in self._pids.values():
            _signal_all_of(pid, signal.SIGTERM if number == signal.SIGQUIT else number)

    def let_go(self) -> None:
        """See ``Orders``."""
        if self._children.channel is not None:
            self._children.channel.let_go()

    def note(self, text: str) -> None:
        """See ``Orders``."""
        self._note(text)

    def describe_end(self, rank: int | None, status: int) -> str:
        """See ``Orders``."""
        return f"{self._children.describe(rank)} {describe_status(status)}"

    def explain_end(self, rank: int, status: int) -> str:
        """See ``Orders``."""
        self._culprits = self._culprits or self._name_culprits(rank)
        return self._whys.get(rank, "") + self._children.explain(rank, status, self._files)

    def find_leaving_before(self, rank: int, others: Set[int]) -> frozenset[int]:
        """See ``Orders``."""
        return read_leaving_before(self._files.receipt_dir, rank, others, self._end.statuses)

    # The end

    def _end_left_behind(self, wakeup: int) -> None:
        """Give what ranks that ended well have started the time to end; a signal to the job cuts it short."""
        left = self._left_behind = LeftBehind(self._options.grace_period_s)
        while not self._end.is_ending and left.lives():
            self._turn(wakeup)
        if left.count and not self._options.quiet:
            named = "process" if left.count == 1 else "processes"
            self._note(f"warning: ended {left.count} {named} that ranks had left behind")

    def _finish(self, wakeup: int) -> int:
        """Leave no process, no output and no reason behind."""
        left = sorted({*self._pids.values(), *sweep(_SWEEP_LIMIT_S)})
        for rank, status in self._lingering.ended(all_of_them=True):
            self._end.rank_ended(rank, status)
        self._rendezvous.stop()
        if self._children.channel is not None:
            self._children.channel.close()
        self._drain(wakeup)
        self._look_at_receipts(late=True)
        if left:
            self._note(f"error: processes {', '.join(map(str, left))} cannot be killed")
        outcome = self._conclude()
        self._receipts.conclude(outcome)
        code = outcome.exit_code or int(self._receipts.lost)
        for console in self._consoles():
            self._flush(console, wakeup)
        return code

    def _conclude(self) -> Outcome:
        """Say the last line and decide the exit code."""
        verdict = self._ask_for_first_failure(self._end.verdict)
        if verdict is not None:
            if verdict.line:
                self._repeat_last_lines(verdict.rank)
                channel = self._children.channel
                told = {} if channel is None or verdict.exit_code == _STALLED else channel.loads()
                named = self._culprits or name_culprits(told.keys(), told, set())
                culprits = f"; {named}" if named else ""
                early, log = self._say_left_early(verdict.rank), self._name_log(verdict.rank)
                self._note(verdict.line + early + culprits + self._say_lack_of_memory(verdict.rank) + log)
            last = self._last_lines_of(verdict.rank)
            return Outcome(verdict.exit_code, self._end.statuses, verdict.line, verdict.rank, last)
        if self._end.signalled is not None:
            line = f"ended by {signal_name(self._end.signalled)}"
            self._note(line)
            return Outcome(0, self._end.statuses, line)
        unsaved = next((stream for stream in self._streams if stream.file_error is not None), None)
        cause = f"{unsaved.file_name} could not be written" if unsaved else ""
        return Outcome(int(self._receipts.lost or unsaved is not None), self._end.statuses, cause)

    def _last_lines_of(self, failed: int | None) -> Sequence[str]:
        """Read what a rank wrote last, or the launcher that passed its output on: errors if there are any."""
        written = {stream.file_name: read_last_lines(stream.last, _KEPT_LINES) for stream in self._streams}
        names = [f"{who}.{name}" for who in (f"rank-{failed}", "launcher") for name in reversed(STREAMS)]
        return next((written[name] for name in names if written.get(name)), ())

    def _repeat_last_lines(self, failed: int | None) -> None:
        """Say once more what the rank that failed wrote last, if others have written since."""
        if failed is None or self._options.quiet:
            return
        if self._options.words_fd is not None:  # nothing else of the ranks was on the terminal
            if lines := self._last_lines_of(failed):
                self._note("\n  ".join([f"the last lines of rank {failed}:", *lines]))
            return
        if not self._children.mixed:
            return
        name = f"rank-{failed}.stderr"
        own = next((stream for stream in self._streams if stream.file_name == name), None)
        if own is None:
            return  # It came by way of the launcher.
        is_last = all(other.passed <= own.passed for other in self._streams if other.console is own.console)
        if not is_last and (lines := read_last_lines(own.last)):
            self._note("\n  ".join([f"the last lines of rank {failed} on stderr:", *lines]))

    def _say_lack_of_memory(self, failed: int | None) -> str:
        """Say what to try where the rank that failed wrote last that its device's memory ran out."""
        lms = {receipt.lms for receipt in self._receipts.receipts if failed in (None, receipt.rank)}
        said = explain_lack_of_memory(self._last_lines_of(failed), lms)
        return f"; {said}" if said else ""

    def _name_log(self, failed: int | None) -> str:
        """Name the files that hold what the rank that failed wrote, if there are any."""
        if self._files.output_dir is None or failed is None:
            return ""
        host = self._plan.ranks[failed].host
        where = "" if host == "localhost" else f" on {host}"
        path = f"{self._files.output_dir}/rank-{failed}"
        return f"; its output is in {path}.stdout and {path}.stderr{where}"

    def _say_left_early(self, failed: int | None) -> str:
        """Name the ranks that had left with 0 when one failed: a collective fails once a peer is gone."""
        if failed is None:
            return ""
        well = {number for number, status in self._end.statuses.items() if status == 0}
        left = sorted(self.find_leaving_before(failed, well))
        named = "rank" if len(left) == 1 else "ranks"
        return f", after {named} {format_ids(left)} had left with code 0" if left else ""

    def _ask_for_first_failure(self, verdict: Verdict | None) -> Verdict | None:
        """Name the rank that failed where its launcher alone did; the receipts know better than its code."""
        if verdict is None or not verdict.of_launcher or self._end.signalled is not None:
            return verdict
        failure = self._children.find_first_failure(self._files)
        if failure is None:
            return verdict
        rank = describe_rank(self._plan.ranks[failure.rank])
        return Verdict(failure.exit_code, f"{rank} {failure.how}", failure.rank)

    def _drain(self, wakeup: int) -> None:
        """Pass on what the ranks had written; a pipe that some outsider holds open is not waited for."""
        limit = time.monotonic() + _UNDERWAY_S
        for stream in self._streams:
            while stream.open and (stream.pump() or self._comes_late(stream, limit, wakeup)):
                self._check_file(stream)
                if stream.console.sink.full:
                    self._flush(stream.console, wakeup)
            stream.close()
        for console in self._consoles():
            console.finish()

    def _comes_late(self, stream: RankStream, limit: float, wakeup: int) -> bool:
        """Wait for what a rank elsewhere had sent before it ended, and is still under way."""
        if self._end.hurried or not stream.open or not stat.S_ISSOCK(os.fstat(stream.fd).st_mode):
            return False
        ready = poll([stream.fd, wakeup], [], max(0.0, limit - time.monotonic()))
        if wakeup in ready:
            self._take_notice(os.read(wakeup, 4096))
        return bool(ready)

    def _flush(self, console: Console, wakeup: int) -> None:
        """Wait for the reader of our output, which may be a person with a pager.

        If the user insists on the end, only what goes at once is written. Where the job was told to end, a
        reader that takes nothing has as long as a rank, and a second at least.
        """
        while console.sink.waiting:
            patience_s = max(_PAUSE_S, self._options.grace_period_s) if self._end.was_told else None
            watched = [wakeup, self._front] if self._front >= 0 else [wakeup]
            ready = poll(watched, [console.sink.fd], 0 if self._end.hurried else patience_s)
            if wakeup in ready:
                self._take_notice(os.read(wakeup, 4096))
            if self._front in ready:
                self._front_is_gone()
            if console.sink.fd in ready:
                self._pump_sinks({console.sink.fd})
            elif self._end.hurried:
                return
            elif not ready:
                console.sink.give_up()
                rest = "only in the files" if self._files.output_dir is not None else "lost"
                self._note(
                    f"error: nobody has read the output for {patience_s:g} s; the rest of it is {rest}"
                )

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


def _signal_all_of(pid: int, number: int) -> None:
    """Signal the group that a child leads, and wake what is stopped of it, to take note."""
    signal_group(pid, number)
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal_group(pid, signal.SIGCONT)
