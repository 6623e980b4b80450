"""The warm process: imports torch once, then forks a rank whenever its agent asks. Also starts a single rank by itself.

    python [flags] fork_server.py fork CHANNEL_FD AGENT_PID script.py args...     the warm process
    python [flags] fork_server.py once SPEC_FD    AGENT_PID script.py args...     one rank, nothing imported for it
    python         fork_server.py exec SPEC_FD    AGENT_PID command args...       one rank that is any command

This file is run by path with the script's own interpreter, which may have no rankwise: it imports the standard library,
torch, and what lies beside it and imports no more. Over CHANNEL go JSON lines; nothing executable crosses it.

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

import contextlib
import faulthandler
import functools
import gc
import io
import json
import os
import re
import signal
import socket
import sys
import time
import types

if not __package__:  # run by its path: there is no package to import its few files from
    __package__ = "_rankwise.agent"
    folder = os.path.dirname(os.path.abspath(__file__))
    for package, path in (("_rankwise", os.path.dirname(folder)), (__package__, folder)):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [path]

from ..host import main_script  # noqa: TID252  # under either name
from . import collective_notes, exception_record, private_names

_PR_SET_PDEATHSIG = 1


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
    """What the warm process does. Returns a spec in each rank; ends when the agent closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides when this process ends
    _die_with(agent)
    gc.disable()  # a collection during the imports only walks what stays for ever: a third of their time
    try:
        import torch

        if _may_compile(sys.argv):
            # It imports the compiler, which else every rank does, for its first one.
            torch.optim.SGD([torch.zeros(1)], lr=0.0)
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
            _send(channel, {"failed": f"cannot fork: {error.strerror}"})
            continue
        if middle == 0:
            spec = _fork_ranks(channel, json.loads(line)["ranks"])
            lines.close()
            channel.close()
            _become_rank(spec, agent)
            return spec
        status = os.waitpid(middle, 0)[1]
        if status != 0:
            _send(channel, {"failed": f"the process that forks the ranks exited with status {status}"})
    return None


def _may_compile(command):
    """Whether the ranks may import torch's compiler, which takes as long as torch itself: optimizers do, DDP, and the compiler.

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
            for begun in pids:  # they wait for the agent, which could not distinguish them from those that it starts instead
                os.kill(begun, signal.SIGKILL)
            _send(channel, {"failed": f"cannot fork: {error.strerror}"})
            os._exit(0)
        if pid == 0:
            return spec
        pids.append(pid)
    _send(channel, {"pids": pids})
    os._exit(0)


def _send(channel, message):
    try:
        channel.sendall(json.dumps(message).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):  # the agent is gone: it ends what is left
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
    """As soon as a request to stop is remembered (rankwise/stop/early.py). A version without it remembers none."""
    if tell := getattr(getattr(package, "early", None), "tell", None):
        tell(functools.partial(_set_mark, *mark))


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
    interrupted, status = False, 0
    try:
        if command[0] == "-m":
            # It takes what `__main__` is: this file, whose names the module's would replace.
            sys.modules["__main__"] = types.ModuleType("__main__")
            private_names.run_module(command[1])
        else:
            main_script.run(command[0])
    except SystemExit as end:
        status = _exit_status(end)
    except KeyboardInterrupt as error:
        exception_record.print_exception(error, exception_record.as_text(error), brief=False)
        interrupted = True
    except BaseException as error:
        try:
            status = exception_record.leave(error, spec)
        except BaseException as later:  # of a handler of the script's, which may run at the call itself
            status = exception_record.leave(exception_record.reason(error, later), spec)
    if distributed.made_a_group():
        _set_mark(*spec["group_mark"])
    if not private_names.end_python():
        _leave_the_end_to_python(status, interrupted)
    output_lost = _flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status or output_lost)


def _leave_the_end_to_python(status, interrupted):
    """It takes torch apart, too: seconds, and gloo can hang there."""
    if interrupted:
        sys.excepthook = lambda *_: None  # what it would print is printed
        raise KeyboardInterrupt
    sys.exit(status)


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


def _flush():
    """What the interpreter does after the exit functions, up to where it would take torch apart (seconds, and gloo can hang
    there). Returns 120 if output is lost, 0 otherwise."""
    status = 0
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
