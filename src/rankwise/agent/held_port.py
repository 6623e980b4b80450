"""A port of this host that is reserved for rank 0's store; if it is taken, by whom.

holder = hold_port(0);  holder.getsockname()[1]
"""

from __future__ import annotations

import contextlib
import os
import socket

from rankwise.errors import ConfigError

_LONGEST_COMMAND = 120


def hold_port(port: int) -> socket.socket:
    """A port of this host that stays ours (0: any): bound, never listening, so that torch's TCPStore can listen on it with
    SO_REUSEADDR while every other `bind(0)` passes it by. A crash leaves none of it behind.

    Bound before the option is set: two holders that both had it would both succeed. ConfigError when the port is taken.
    """
    holder = socket.socket()
    try:
        holder.bind(("", port))
    except OSError as error:
        holder.close()
        raise port_taken(port, error) from None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def port_taken(port: int, error: OSError, manually: bool = False) -> ConfigError:
    """`manually`: the user gives each node the port."""
    why = os.strerror(error.errno).lower() if error.errno else str(error)
    cure = "the same on all nodes" if manually else "or leave the option out for a free one"
    return ConfigError(f"--master-port {port}: {why} ({_user_of(port)}); choose another, {cure}")


def _user_of(port: int) -> str:
    """Who listens there, if this user may know."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                words = " ".join(psutil.Process(connection.pid).cmdline()[:4]).split()  # one line, whatever is in it
                return f"by pid {connection.pid}, {' '.join(words)[:_LONGEST_COMMAND]}"
    return "by another program, or by one that exited less than a minute ago"
