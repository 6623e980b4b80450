from __future__ import annotations

import socket
import time

import pytest

from rankwise.host import listener, network


def test_what_listens_a_moment_later_is_waited_for_and_nothing_else_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test, which each wait moves."""
    now, late = [100.0], network.listen_at("127.0.0.1")
    port = late.getsockname()[1]
    late.close()
    opened: list[socket.socket] = []

    def wait(seconds: float) -> None:
        now[0] += seconds
        if not opened and now[0] > 103.0:
            opened.append(network.listen_at("127.0.0.1", port))

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", wait)
    listener.wait_for("127.0.0.1", port, timeout_s=60.0)
    assert 103.0 < now[0] < 103.2
    opened[0].close()
    listener.wait_for("127.0.0.1", port, timeout_s=60.0)
    assert now[0] == pytest.approx(163.0, abs=0.2)


@pytest.mark.parametrize(("host", "port"), [("a..b", 29500), ("127.0.0.1", 1 << 20)])
def test_what_cannot_be_an_address_is_not_waited_for(host: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    listener.wait_for(host, port, timeout_s=60.0)
