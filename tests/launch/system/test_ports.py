"""Ports are reserved for a server of the same user, and for nobody else."""

import socket

import pytest

from launch.model.errors import JobError
from launch.system.ports import is_port_free, likely_free_port, port_of, reserve_port


def test_a_reserved_port_is_for_one_who_shares_it() -> None:
    with reserve_port() as reserved:
        number = port_of(reserved)
        assert not is_port_free(number)
        with socket.socket() as stranger, pytest.raises(OSError):
            stranger.bind(("", number))
        with socket.socket() as server, socket.socket() as client:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind(("", number))
            server.listen()
            client.connect(("127.0.0.1", number))
            accepted, _ = server.accept()
            accepted.close()


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert not is_port_free(number)
        with pytest.raises(JobError, match=f"port {number} cannot be had here .* choose another --tf-port"):
            reserve_port(number)
    assert is_port_free(number)


def test_a_likely_port_is_none_that_a_kernel_deals_out() -> None:
    assert all(20_000 <= likely_free_port() < 30_000 for _ in range(100))
