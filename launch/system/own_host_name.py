"""Whether a host can find itself by name: Horovod's Gloo ends with a segmentation fault where it cannot."""

import socket
import threading

LIMIT_S = 3.0
"""A name server that does not answer costs 5 to 30 s by itself."""
REMEDY = "add a line 'ADDRESS NAME' to /etc/hosts"


def resolve_name(name: str, limit_s: float = LIMIT_S) -> str | None:
    """Look up the first address of a host name; None when there is none, or none in time.

    Args:
        name: The host's name, as ``uname`` gives it.
        limit_s: How long to wait, in seconds.
    """
    found: list[str] = []
    # A daemon thread: the C library's look-up can be neither cancelled nor waited out.
    asking = threading.Thread(target=_look_up, args=(name, found), daemon=True)
    asking.start()
    asking.join(limit_s)
    return found[0] if found else None


def _look_up(name: str, found: list[str]) -> None:
    try:
        found.append(str(socket.getaddrinfo(name, None)[0][4][0]))
    except (OSError, UnicodeError):
        return
