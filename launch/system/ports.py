"""Ports that a program will listen on: reserved for it, or looked at beforehand."""

import random
import socket

from launch.model.errors import JobError

REUSE = {"TF_GRPC_REUSE_PORT": "1"}
"""Has TensorFlow's servers listen on a port that its own user has reserved."""


def reserve_port(number: int = 0) -> socket.socket:
    """Reserve a port of this host for a server of this user that sets ``SO_REUSEPORT``, until it is closed.

    Nothing listens on it: connections reach that server alone.

    Args:
        number: Which; 0 is any that is free.

    Raises:
        JobError: If it is taken.
    """
    reserved = socket.socket()
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", number))
    except OSError as error:
        reserved.close()
        raise JobError(
            f"port {number} cannot be had here ({error.strerror}); choose another --tf-port"
        ) from error
    return reserved


def likely_free_port() -> int:
    """Choose the first of some ports that are likely to be free on other hosts too.

    It lies below those that kernels deal out (from 32768 on) and above most of those with an owner.
    """
    return random.randrange(20_000, 30_000)  # noqa: S311 - no secret: it only has to differ from job to job


def port_of(reserved: socket.socket) -> int:
    """Tell the number of a reserved port."""
    return int(reserved.getsockname()[1])


def is_port_free(number: int) -> bool:
    """Tell whether a server could listen on a port of this host now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number))
        except OSError:
            return False
    return True
