"""A port of this host that is reserved for rank 0's store; if another process has the port, which one.

holder = hold_port(0);  holder.getsockname()[1]
"""

from __future__ import annotations

import contextlib
import os
import socket

from rankwise.errors import ConfigError

_LONGEST_COMMAND = 120


def hold_port(port: int) -> socket.socket:
    """Reserve a port of this host (0: any free one). The socket is bound but never listens: torch's TCPStore can listen on the
    port with SO_REUSEADDR, but the kernel gives it to no other `bind(0)`. The reservation ends with the process.

    The option is set after the bind: two holders that set it before would both succeed. Raises ConfigError if the port is
    taken.
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
    """`manually`: whether the user gives the port on each node."""
    why = os.strerror(error.errno).lower() if error.errno else str(error)
    cure = "the same on all nodes" if manually else "or leave the option out for a free one"
    return ConfigError(f"--master-port {port}: {why} ({_user_of(port)}); choose another, {cure}")


def _user_of(port: int) -> str:
    """The process that listens there, if this user may see it."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                # On one line, even if an argument has line breaks.
                words = " ".join(psutil.Process(connection.pid).cmdline()[:4]).split()
                return f"by pid {connection.pid}, {' '.join(words)[:_LONGEST_COMMAND]}"
    return "by another program, or by one that exited less than a minute ago"
