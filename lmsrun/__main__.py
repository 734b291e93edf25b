"""Entry point. Ranks start it by path, so that nothing near the user's program shadows our packages."""

import gc
import os
import sys

# Ctrl-C while importing and at exit is no traceback; in between it is an exception, for there is something
# to clean up. One that is ignored (a shell's background job) stays so.
try:
    import signal  # Takes a millisecond for its enumerations.

    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Else nobody learns how a child has ended.
    _CAN_INTERRUPT = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _CAN_INTERRUPT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
except KeyboardInterrupt:
    sys.exit(130)

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(_HERE)
_OURS = ("launch", "launch.py", "lms", "lms.py", "lmsrun", "lmsrun.py")


def _import_path(entries: list[str]) -> list[str]:
    """Build the import path on which our packages are ours: another `launch` (ROS has one) may be ahead.

    Started by path, Python puts this very folder first. Installed, our root holds other people's packages
    too, and stays behind the standard library unless it has to come first.
    """
    others = [entry for entry in entries if entry != _HERE]
    for entry in others:
        if entry == _ROOT:
            return others
        if any(os.path.exists(os.path.join(entry, name)) for name in _OURS):
            break
    return [_ROOT, *(entry for entry in others if entry != _ROOT)]


if sys.path[:1] != [_ROOT]:
    sys.path[:] = _import_path(sys.path)


def main() -> int:
    """Run the command line; returns its exit code."""
    # Looking for garbage while importing is a tenth of the start-up (127 against 113 ms to the first rank).
    gc.disable()
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if (
            getattr(sys, name) is None
        ):  # Closed by the caller (>&-); what is opened next must not take its number.
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
            setattr(sys, name, open(fd, "w"))  # noqa: SIM115 - for the rest of the process
        os.set_blocking(fd, True)  # Another program that shares it may have changed that; text would be lost.
    # `env =x` makes a variable without a name; Python starts no program with one.
    environ = {name: text for name, text in os.environ.items() if name}
    if sys.argv[1:2] == ["worker"] and environ.get("LMSRUN_EXPECT"):
        from launch.rank.shim import main as work  # The short way: a rank needs nothing of the command line.

        work(sys.argv[2:], environ)
    from lmsrun.cli import INTERRUPTED
    from lmsrun.cli import main as command_line

    try:
        if _CAN_INTERRUPT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command_line(sys.argv[1:], environ)
    except KeyboardInterrupt:  # Between these two lines.
        return INTERRUPTED
    finally:
        if _CAN_INTERRUPT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
