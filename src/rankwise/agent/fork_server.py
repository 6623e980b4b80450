"""The warm process: imports torch once, then forks a rank whenever its agent asks. Also starts a single rank by itself.

    python [flags] fork_server.py fork CHANNEL_FD AGENT_PID script.py args...     the warm process
    python [flags] fork_server.py once SPEC_FD    AGENT_PID script.py args...     one rank, nothing imported for it
    python         fork_server.py exec SPEC_FD    AGENT_PID command args...       one rank that is any command

This file is run by path with the script's own interpreter, which may have no rankwise: it imports the standard library
alone, and torch. Over CHANNEL go JSON lines; nothing executable crosses it.

    warm -> agent    {"ready": true} or {"failed": "why"}            after the imports
    agent -> warm    {"ranks": [spec, ...]}                          fork them
    warm -> agent    {"pids": [pid, ...]} or {"failed": "why"}

A spec: environment (all of it), log (path), exception (path), stacks (path), stdin (bool), threads (int or null), go_mark,
group_mark and answers_mark (each a path and an offset in it: the byte there is set when the rank may begin; the rank sets it if
it ever made a process group, and if its rankwise remembers a request to stop), last_words (a path, an offset and a size: memory
for an exception that the disk does not take), count_mark (a place where the rank counts its collectives), notes (null, or where
this rank notes each collective before it enters it: a path, the start of its part, and the sizes in it;
agent/collective_check.py reads them).

The process stays single-threaded (OMP_NUM_THREADS=1, and it never runs a parallel region), as threads do not survive a
fork. Ranks are forked twice: the middle process announces them and ends, they fall to the agent, which alone reaps them.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib.util
import io
import json
import mmap
import multiprocessing.connection
import os
import re
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import types

_PR_SET_PDEATHSIG = 1


def _load(name):
    """A module of rankwise, by its path: where this file is run by its own there is no package to import it from."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_rankwise_{os.path.basename(name)}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


collective_notes = _load("agent/collective_notes")
main_script = _load("host/main_script")


def main():
    mode, fd, agent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    command = sys.argv[4:]
    if mode == "exec":
        _become_rank(_read_spec(fd), agent)
        _become_command(command)
    _look_like_the_script(command)
    if mode == "once":
        spec = _read_spec(fd)
        _become_rank(spec, agent)
        distributed = collective_notes.Distributed(spec["notes"], spec["count_mark"])
        distributed.prepare_later()
    else:
        spec = _serve(socket.socket(fileno=fd), agent)
        if spec is None:
            return
        distributed = collective_notes.Distributed(spec["notes"], spec["count_mark"])
        distributed.prepare()
    _run(command, spec, distributed)


def _read_spec(fd):
    with os.fdopen(fd) as file:
        return json.load(file)


def _become_command(command):
    """Death with the parent stays armed over an exec; what Python has done to signals does not suit other programs."""
    for signum in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    faulthandler.disable()
    faulthandler.unregister(signal.SIGRTMIN + 3)
    signal.signal(signal.SIGRTMIN + 3, signal.SIG_IGN)
    _let_interrupts_in()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _look_like_the_script(command):
    """sys.argv, sys.path[0] and sys.orig_argv as under `python script.py args...`."""
    flags = sys.orig_argv[1 : sys.orig_argv.index(__file__)]
    sys.orig_argv[1:] = flags + command
    if command[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = ["-m", *command[2:]]
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(command[0]))
        sys.argv = list(command)


def _serve(channel, agent):
    """The warm process's life. Returns a spec in each rank; ends when the agent closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides when this process ends
    _die_with(agent)
    gc.disable()  # a collection during the imports only walks what lives for ever: a third of their time
    try:
        import torch

        if _may_compile(sys.argv):
            import torch._dynamo  # noqa: F401  # else every rank imports it, for its first optimizer
    except BaseException as error:  # what a folder named like a library raises is the script's business
        _send(channel, {"failed": f"{type(error).__name__}: {error}"})
        return None
    gc.freeze()  # the ranks' collector never touches these pages: they stay shared
    _send(channel, {"ready": True})
    lines = channel.makefile("r")
    for line in lines:
        try:
            middle = os.fork()
        except OSError as error:
            _send(channel, {"failed": f"it cannot fork: {error.strerror}"})
            continue
        if middle == 0:
            spec = _fork_ranks(channel, json.loads(line)["ranks"])
            lines.close()
            channel.close()
            _become_rank(spec, agent)
            return spec
        status = os.waitpid(middle, 0)[1]
        if status != 0:
            _send(channel, {"failed": f"the process that forks the ranks ended with status {status}"})
    return None


def _may_compile(command):
    """Whether the ranks may import torch._dynamo, which takes as long as torch itself: optimizers do, DDP, and the compiler.

    A guess from the script's text: where it is wrong each rank imports it by itself, or this process has for nothing.
    """
    if command[0] == "-m":
        return True
    with open(command[0], "rb") as file:
        source = file.read()
    if re.search(rb"optim|compile|Distributed|Trainer", source):
        return True
    imports = re.findall(rb"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., ]+))", source, re.MULTILINE)
    words = {word.split()[0] for package, several in imports for word in (package or several).split(b",") if word.strip()}
    modules = {word.split(b".")[0].decode() for word in words}
    return not modules <= {*sys.stdlib_module_names, "torch", "numpy", "rankwise"}


def _fork_ranks(channel, specs):
    """In the middle process: fork all, announce them, end. Returns in each rank with its spec."""
    pids = []
    for spec in specs:
        try:
            pid = os.fork()
        except OSError as error:
            for begun in pids:  # they wait for the agent's go, and it would not tell them from those it starts instead
                os.kill(begun, signal.SIGKILL)
            _send(channel, {"failed": f"it cannot fork: {error.strerror}"})
            os._exit(0)
        if pid == 0:
            return spec
        pids.append(pid)
    _send(channel, {"pids": pids})
    os._exit(0)


def _send(channel, message):
    try:
        channel.sendall(json.dumps(message).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):  # the agent wants no ranks any more: it ends what is left
        os._exit(0)


def _die_with(agent):
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)


def _become_rank(spec, agent):
    """All that makes a forked process a fresh one, and this rank."""
    while os.getppid() != agent:  # armed before the adoption, death with the parent would come at once
        time.sleep(0.0002)
        if os.getppid() == 1:
            os._exit(1)
    _die_with(agent)
    os.environ.clear()
    os.environ.update(spec["environment"])
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if not spec["stdin"]:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    # Line by line: the agent shows what is in the file, and a rank that is killed leaves what it printed.
    for name, fd in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).reconfigure(line_buffering=True)
        assert getattr(sys, name).fileno() == fd
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=2)
    # For the agent, when nothing moves. Not USR1 or USR2: those belong to schedulers and to scripts.
    stacks = os.open(spec["stacks"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(signal.SIGRTMIN + 3, file=stacks, all_threads=True)
    _wait_for_go(*spec["go_mark"])
    sys.meta_path.insert(0, collective_notes.AfterImport("rankwise", functools.partial(_note_answers, spec["answers_mark"])))
    gc.enable()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(spec["threads"])
        sys.modules["torch"].default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as in a fresh process: different in each
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"]
        process.current_process().authkey = os.urandom(32)
        process.ORIGINAL_DIR = os.getcwd()


def _note_answers(mark, package):
    """Whether a request to stop is remembered from now on (rankwise/stop/early.py): a version without it remembers none."""
    if getattr(getattr(package, "early", None), "listening", False):
        _set_mark(*mark)


def _set_mark(page, offset):
    with contextlib.suppress(OSError), open(page, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"\1", offset)


def _wait_for_go(page, offset):
    """Until the agent knows this process: if the warm process dies before it has announced the ranks, they are killed and
    started otherwise, and no script has run twice."""
    fd = os.open(page, os.O_RDONLY | os.O_CLOEXEC)
    while os.pread(fd, 1, offset) != b"\1":
        time.sleep(0.0005)
    os.close(fd)


def _run(command, spec, distributed):
    """Run the script as Python would, leave evidence if it raises, and end this process as Python would."""
    _let_interrupts_in()
    try:
        if command[0] == "-m":
            # It takes what `__main__` is: this file, whose names the module's would replace.
            sys.modules["__main__"] = types.ModuleType("__main__")
            runpy._run_module_as_main(command[1])
        else:
            main_script.run(command[0])
        status = 0
    except SystemExit as end:
        status = _exit_status(end)
    except KeyboardInterrupt as error:
        _print_exception(error, _as_text(error), brief=False)
        _end_of_python(spec, distributed)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        status = _exception_status(error, spec)
    output_lost = _end_of_python(spec, distributed)
    os._exit(status or output_lost)


def _let_interrupts_in():
    """The agent has started this process with SIGINT blocked. One that came while it was made ready ends it here: there is no
    line of the script that it could interrupt."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, handler)


def _exit_status(end):
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    with contextlib.suppress(OSError):
        print(end.code, file=sys.stderr)
    return 1


def _exception_status(error, spec):
    error, release = _hold_signals(error)
    error = _of_a_dead_worker(error)
    status = getattr(error, "exit_status", 1)  # our own errors carry one, and need no traceback
    brief = isinstance(status, int) and type(error).__module__.startswith("rankwise.")
    _free_a_descriptor()
    text = _as_text(error, brief)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    record = {
        "log_bytes": os.fstat(2).st_size,  # what comes after it is this exception, which others will tell
        "type": type(error).__qualname__,
        "message": str(error),
        "traceback": text,
        "where": _where(error),
        "time": time.time(),
        "notes": [str(note) for note in getattr(error, "__notes__", ())],
        "parameters": {},
        "shortage": None,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "local_rank": os.environ.get("LOCAL_RANK"),
    }
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
        _leave_in_memory(record, *spec["last_words"])
    _print_exception(error, text, brief)
    release()
    return status if brief else 1


def _leave_in_memory(record, path, offset, size):
    """Where the disk is full, which may be what has ended this rank: as much of the texts as there is room for."""
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
    """(the error to tell, a function that gives the signals back): from here on nothing interrupts what tells it.

    A handler of the script's may raise at any line: torch's for SIGCHLD does, when a loader worker has died. One that was due
    runs while it is replaced; if that says which worker has died, it says why `error` came.
    """
    before, came = {}, []

    def hold(signum, _frame):
        came.append(signum)

    def release():
        for signum, handler in before.items():
            if signum != signal.SIGCHLD:  # all that it could still do is to raise a second error
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
            if str(later).startswith("DataLoader worker"):
                error = later.with_traceback(error.__traceback__)


def _of_a_dead_worker(error):
    """An error that says how a loader worker has died, where all that came of it yet is a broken connection to it."""
    unexpected = str(error).startswith("DataLoader worker (pid(s)")  # torch has not looked how
    if not unexpected and not isinstance(error, (ConnectionError, EOFError, FileNotFoundError)):
        return error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    loaders = [f.f_locals.get("self") for f in frames if f.f_code.co_filename.endswith("torch/utils/data/dataloader.py")]
    workers = next((loader._workers for loader in reversed(loaders) if getattr(loader, "_workers", None)), [])
    # Its connections break a moment before it can be seen to have ended.
    ended = multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=1.0) if workers else []
    for worker in workers:
        if worker.sentinel in ended:
            worker.join(1.0)
            code = worker.exitcode
            how = f"is killed by signal: {signal.strsignal(-code)}" if code and code < 0 else f"left with status {code}"
            found = RuntimeError(f"DataLoader worker (pid {worker.pid}) {how}.").with_traceback(error.__traceback__)
            found.__cause__ = error
            return found
    return error


def _without_our_frames(tb):
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while tb is not None and (tb.tb_frame.f_code.co_filename in ours or "__tracebackhide__" in tb.tb_frame.f_globals):
        tb = tb.tb_next
    return tb


def _where(error):
    """The innermost line of the script, or of the user's modules, that was running: `train.py:61`."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if file == script or _is_the_users(file)]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else None


def _is_the_users(file):
    libraries = [os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    libraries += [os.path.dirname(module.__file__) for name in ("torch", "rankwise") if (module := sys.modules.get(name))]
    installed = "/site-packages/" in file or "/dist-packages/" in file or file.startswith("<")
    return not installed and not any(file.startswith(folder + os.sep) for folder in libraries)


def _free_a_descriptor():
    """To tell an exception takes one: where none is left standard input is given up."""
    try:
        os.close(os.dup(2))
    except OSError:
        with contextlib.suppress(OSError):
            os.close(0)


def _shortage(error):
    """Where files or processes were refused: how many there may be, and are now (some may have gone with what failed)."""
    text = str(error)
    if "Too many open files" in text or "received 0 items of ancdata" in text:  # as multiprocessing says it
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"at most {limit} open files a process (ulimit -n), {len(os.listdir('/proc/self/fd')) - 1} here now"
    if "Resource temporarily unavailable" not in text and "can't start new thread" not in text:
        return None
    tasks = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                tasks += len(os.listdir(f"/proc/{name}/task"))
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if not 0 < limit < 2 * tasks + 64:
        return None  # so far away that another limit must have been the reason
    return f"at most {limit} processes and threads of this user (ulimit -u), {tasks} now"


def _parameters_in(error):
    """{number: "name (module)"} of the parameters that DDP has only numbers for in its message."""
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


def _as_text(error, brief=False):
    error = error.with_traceback(_without_our_frames(error.__traceback__))
    if not brief:
        return "".join(traceback.format_exception(error))
    where = _where(error)
    return f"error: {error}\n" + (f"  at {where}\n" if where else "")


def _print_exception(error, text, brief):
    if sys.excepthook is not sys.__excepthook__ and not brief:  # the script's own
        with contextlib.suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
            return
    with contextlib.suppress(OSError):  # its log is on a full disk
        print(text, end="", file=sys.stderr)


def _end_of_python(spec, distributed):
    """What the interpreter does at its end, up to where torch would be taken apart (seconds, and gloo can hang there)."""
    status = 0
    if distributed.made_a_group():
        _set_mark(*spec["group_mark"])
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            status = 120  # as Python itself reports it
    # Of the type, not of the object: asking some objects for their class runs code of theirs.
    files = [f for f in gc.get_objects() if issubclass(type(f), io.IOBase)]
    for file in sorted(files, key=lambda f: not isinstance(f, io.TextIOBase)):  # texts first: they fill the buffers below
        with contextlib.suppress(Exception):
            if not file.closed and file.writable():
                file.flush()
    return status


if __name__ == "__main__":
    main()
