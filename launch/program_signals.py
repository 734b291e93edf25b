"""The signals that a program must meet as its user's shell would have left them."""

import signal


def restore_signals() -> None:
    """Undo what Python ignores from its start, before an exec hands it on to a program."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
