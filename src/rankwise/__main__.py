"""The start of the command: `rankwise`, and `python -m rankwise`."""

import signal
import sys


def start() -> None:
    """Run the command. Ctrl-C while our modules are imported ends it without a message: nothing was started, and a traceback
    would not help."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise the caller has set it to be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A caller that ignores SIGCHLD passes this on, and the kernel would throw away the exit status of each child of ours.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    from rankwise.cli import main

    main(prog_name="rankwise")


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder: it may contain a secrets.py or platform.py, which rankwise must not import
    start()
