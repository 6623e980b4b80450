"""Waits until something listens on a port.

listener.wait_for("node1", 29500)    # for ten seconds at most

agent/fork_server.py loads this file by its path, in the script's own interpreter: it imports only the standard library.
"""

import socket
import time

_ABOUT_AT_ONCE_S = 10.0  # ranks that start together differ by less


def wait_for(host: str, port: int, timeout_s: float = _ABOUT_AT_ONCE_S) -> None:
    """Return as soon as something listens there, or after `timeout_s`. Unlike torch's store, which tries again after half a
    second if rank 0 is a millisecond later than another rank. An address that cannot be one is left to torch."""
    if not 0 < port < 65536:
        return
    deadline, pause_s = time.monotonic() + timeout_s, 0.004
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=left_s).close()
            return
        except ValueError:
            return
        except OSError:
            time.sleep(min(pause_s, left_s))
        pause_s = min(1.5 * pause_s, 0.1)  # `host` may be a name, for which a server is asked each time
