"""The command from its first moment: `rankwise`, and `python -m rankwise`."""

import signal


def start() -> None:
    """Ctrl-C while our modules are imported ends it without a word: nothing was started, and our traceback is of no use."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rankwise.cli import main

    main(prog_name="rankwise")


if __name__ == "__main__":
    start()
