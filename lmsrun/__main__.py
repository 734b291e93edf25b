"""Entry point. Ranks start it by path, so that nothing near the user's program shadows our packages."""

import gc
import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if sys.path[:1] != [_ROOT]:
    # Started by path, Python puts this very folder first; and another `launch` (ROS has one) may be ahead.
    sys.path[:] = [_ROOT, *(entry for entry in sys.path if entry not in (_ROOT, os.path.dirname(__file__)))]


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
    if sys.argv[1:2] == ["worker"]:
        from launch.worker import main as work  # The short way: a rank needs nothing of the command line.

        work(sys.argv[2:], os.environ)
    from lmsrun.cli import main as command_line

    return command_line(sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(main())
