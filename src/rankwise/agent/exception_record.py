"""When an exception ends a rank: writes a record for the agent, and prints the traceback into the log.

    status = exception_record.leave(error, spec)      # spec: see fork_server.py

fork_server.py loads this file by its path, in the script's own interpreter: it imports only the standard library.
"""

import contextlib
import json
import mmap
import multiprocessing.connection
import os
import re
import resource
import runpy
import signal
import sys
import time
import traceback

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def leave(error, spec):
    """Report how this rank failed, even without free descriptors or disk space; returns the status to exit with."""
    error, release = _hold_signals(error)
    error = _of_a_dead_worker(error)
    ours = type(error).__module__.startswith("rankwise.")
    status = getattr(error, "exit_status", 1) if ours else 1  # rankwise's errors have a status, and need no traceback
    brief = ours and isinstance(status, int)
    _free_a_descriptor()
    text = as_text(error, brief)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    record = {
        "log_bytes": _log_bytes(spec["log"]),  # the log after this point is this exception, which the launcher prints
        "type": type(error).__qualname__,
        "message": _message(error),
        "traceback": text,
        "where": _where(error),
        "time": time.time(),
        "notes": [],
        "parameters": {},
        "shortage": None,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "local_rank": os.environ.get("LOCAL_RANK"),
    }
    with contextlib.suppress(Exception):
        record["notes"] = [str(note) for note in getattr(error, "__notes__", ())]
    with contextlib.suppress(Exception):
        record["parameters"] = _parameters_in(error)
    with contextlib.suppress(Exception):
        record["shortage"] = _shortage(error)
    temporary = spec["exception"] + ".tmp"
    try:
        with open(temporary, "w") as file:
            json.dump(record, file)
        os.replace(temporary, spec["exception"])
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(temporary)  # noqa: PTH107  # pathlib is not imported here
        leave_in_memory(record, *spec["last_words"])
    chosen = print_exception(error, text, brief)
    with contextlib.suppress(BaseException):  # from the script's handler of a signal that came meanwhile
        release()
    return chosen if chosen is not None else status if brief else 1


def _log_bytes(path):
    """The size of the rank's log. By its path: the script may have directed its stderr elsewhere, for example to /dev/null."""
    for log in (path, 2):  # it may also have removed the log
        with contextlib.suppress(OSError):
            return os.stat(log).st_size
    return 1 << 62


def _message(error):
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"  # as Python prints it


def leave_in_memory(record, path, offset, size):
    """Leave the record in shared memory if the disk is full, which may be why this rank failed. Texts are cut to fit into
    `size`."""
    for longest in (size, 1000, 300, 100):
        short = {
            key: value[-longest:] if key == "traceback" else value[:longest] if isinstance(value, str) else value
            for key, value in record.items()
            if longest == size or key not in ("notes", "parameters")
        }
        data = json.dumps(short).encode()
        if len(data) <= size:
            break
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[offset : offset + len(data[:size])] = data[:size]


def _hold_signals(error):
    """Returns (the error to report, a function that restores the signals). Until then no signal interrupts the report.

    A handler of the script may raise at any line: torch's handler of SIGCHLD does, when a loader worker has died. A pending
    signal may still run its handler while we replace it; if that error names the worker that died, it is the reason for
    `error`.
    """
    before, came = {}, []

    def hold(signum, _frame):
        came.append(signum)

    def release():
        for signum, handler in before.items():
            if signum != signal.SIGCHLD:  # its handler could only raise a second error
                signal.signal(signum, handler)
        for signum in set(came):
            if signum != signal.SIGCHLD:
                os.kill(os.getpid(), signum)

    while True:
        try:
            for signum in signal.valid_signals():
                handler = signal.getsignal(signum)
                ends = handler is signal.SIG_DFL and signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
                if handler is not hold and ((callable(handler) and not isinstance(handler, int)) or ends):
                    before.setdefault(signum, handler)
                    signal.signal(signum, hold)
            return error, release
        except BaseException as later:
            error = reason(error, later)


def reason(error, later):
    """`error`, or `later`, which a signal handler raised since, if `later` says which loader worker has died."""
    return later.with_traceback(error.__traceback__) if _message(later).startswith("DataLoader worker") else error


def _of_a_dead_worker(error):
    """If `error` is only a broken connection to a loader worker that has died: an error that says how it died. Otherwise
    `error`."""
    unexpected = _message(error).startswith("DataLoader worker (pid(s)")  # torch did not find out how
    if not unexpected and not isinstance(error, (ConnectionError, EOFError, FileNotFoundError)):
        return error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    loaders = [f.f_locals.get("self") for f in frames if f.f_code.co_filename.endswith("torch/utils/data/dataloader.py")]
    workers = next((found for loader in reversed(loaders) if (found := _processes(loader))), [])
    # A worker's connections break a moment before its exit can be seen.
    ended = multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=1.0) if workers else []
    for worker in workers:
        if worker.sentinel in ended:
            worker.join(1.0)
            code = worker.exitcode
            how = f"is killed by signal: {signal.strsignal(-code)}" if code and code < 0 else f"exited with status {code}"
            found = RuntimeError(f"DataLoader worker (pid {worker.pid}) {how}.").with_traceback(error.__traceback__)
            found.__cause__ = error
            return found
    return error


def _processes(loader):
    """The workers of an iterator of torch's DataLoader: the list of processes among its attributes."""
    lists = [value for value in getattr(loader, "__dict__", {}).values() if isinstance(value, list)]
    return [item for items in lists for item in items if hasattr(type(item), "sentinel")]


def _without_our_frames(tb):
    while tb is not None and (_is_ours(tb.tb_frame.f_code.co_filename) or "__tracebackhide__" in tb.tb_frame.f_globals):
        tb = tb.tb_next
    last = tb
    while last is not None:  # wrappers that are between two other frames (data_wait.py)
        while (following := last.tb_next) and following.tb_next and _is_in_our_folder(following.tb_frame.f_code.co_filename):
            last.tb_next = following.tb_next
        last = last.tb_next
    return tb


def _is_ours(file):
    return file in (runpy.__file__, "<frozen runpy>") or _is_in_our_folder(file)


def _is_in_our_folder(file):
    return os.path.dirname(file) == _FOLDER


def _where(error):
    """The innermost line of the script, or of the user's modules, that was running: `train.py:61`."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if file == script or _is_the_users(file)]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else None


def _is_the_users(file):
    libraries = [os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    libraries += [os.path.dirname(module.__file__) for name in ("torch", "rankwise") if (module := sys.modules.get(name))]
    installed = "/site-packages/" in file or "/dist-packages/" in file or file.startswith("<")
    return not installed and not any(file.startswith(folder + os.sep) for folder in libraries)


def _free_a_descriptor():
    """Reporting an exception needs a file descriptor: if none is left, close standard input."""
    try:
        os.close(os.dup(2))
    except OSError:
        with contextlib.suppress(OSError):
            os.close(0)


def _shortage(error):
    """If the system refused memory, a file or a process: the limit, and how many there are now (some may be gone with what
    failed)."""
    text = str(error)
    if "Too many open files" in text or "received 0 items of ancdata" in text:  # the second is how multiprocessing reports it
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"at most {limit} open files per process (ulimit -n), {len(os.listdir('/proc/self/fd')) - 1} here now"
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "Cannot allocate memory" in text:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return f"at most {limit / 1e9:.1f} GB of address space per process (ulimit -v)" if limit > 0 else None
    if "Resource temporarily unavailable" not in text and "can't start new thread" not in text:
        return None
    tasks = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                tasks += len(os.listdir(f"/proc/{name}/task"))
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if not 0 < limit < 2 * tasks + 64:
        return None  # so far from the limit that another one must be the reason
    return f"at most {limit} processes and threads of this user (ulimit -u), {tasks} now"


def _parameters_in(error):
    """{number: "name (module)"} of the parameters that DDP's message lists by number only."""
    numbers = set(re.findall(r"\d+", str(error)))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    models = [frame.f_locals.get("self") for frame in frames if frame.f_code.co_filename.endswith("nn/parallel/distributed.py")]
    found, seen = {}, set()
    for prefix, module in models[-1].module.named_modules() if models else ():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if not parameter.requires_grad or id(parameter) in seen or f"{prefix}.{name}" in models[-1].parameters_to_ignore:
                continue
            if str(len(seen)) in numbers:
                found[str(len(seen))] = f"{full} ({type(module).__name__})"
            seen.add(id(parameter))
    return found


def as_text(error, brief=False):
    error = error.with_traceback(_without_our_frames(error.__traceback__))
    if not brief:
        return "".join(traceback.format_exception(error))
    where = _where(error)
    return f"error: {error}\n" + (f"  at {where}\n" if where else "")


def print_exception(error, text, brief):
    """Returns the status to exit with if the script's own hook has chosen one with sys.exit, None otherwise."""
    if sys.excepthook is not sys.__excepthook__ and not brief:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
            return None
        except SystemExit as end:
            return exit_status(end)
        except BaseException:  # then the traceback is printed here
            pass
    _write(text)
    return None


def exit_status(end):
    """The status that Python gives a process for this SystemExit: 255 for a number that no C long holds. Prints its text."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF if -(1 << 63) <= end.code < 1 << 63 else 0xFF
    with contextlib.suppress(Exception):
        _write(f"{end.code}\n")
    return 1


def _write(text):
    """Not with print: scripts often replace it by one that prints nothing on ranks above 0."""
    with contextlib.suppress(Exception):  # the disk of the log may be full, or the script has replaced stderr
        sys.stderr.write(text)
