"""The signals that a program must meet as its user's shell would have left them."""

import signal

PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
"""The signals that a launcher passes on to what it started, unless it ignores them itself."""


def restore_signals() -> None:
    """Undo what Python ignores from its start, before an exec hands it on to a program."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def hold_interrupts() -> None:
    """Let a SIGINT wait until the shim has become its program: Python would end in a traceback of its own."""
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})


def take_interrupts() -> None:
    """Let a SIGINT end this process, also one that was held; one that is ignored stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
