"""Whether a host finds itself, within a time."""

import socket
import threading
import time

import pytest

from launch.system.own_host_name import resolve_name


def test_a_name_that_leads_somewhere() -> None:
    assert resolve_name("127.0.0.1") == "127.0.0.1"
    assert resolve_name("localhost") in ("127.0.0.1", "::1")


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 300, "a..b", "\udcff"])
def test_a_name_that_leads_nowhere(name: str) -> None:
    assert resolve_name(name) is None


def test_a_silent_name_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def ask(*_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        answered.wait(300)
        return [(0, 0, 0, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    started = time.monotonic()
    assert resolve_name("slow", limit_s=0.1) is None
    answered.set()
    assert time.monotonic() - started < 20
