"""The warm process: imports torch once, then forks ranks when its agent asks. Or, without forking, becomes a single rank.

    python [flags] fork_server.py fork CHANNEL_FD AGENT_PID script.py args...     the warm process
    python [flags] fork_server.py once SPEC_FD    AGENT_PID script.py args...     one rank, nothing imported for it
    python         fork_server.py exec SPEC_FD    AGENT_PID command args...       one rank that is any command

This file is run by its path with the script's own interpreter, which may have no rankwise: it imports only the standard
library, torch, and files of rankwise that import no more than that. Messages on CHANNEL are JSON lines; no code is sent.

    warm -> agent    {"ready": true} or {"failed": "why"}            after the imports
    agent -> warm    {"ranks": [spec, ...]}                          fork them
    warm -> agent    {"pids": [pid, ...]} or {"failed": "why"}

A spec: environment (all of it), log (path), exception (path), stacks (path), stdin (bool), threads (int or null), go_mark,
group_mark and answers_mark (each a path and the offset of one byte: the agent sets the first when the rank may begin; the rank
sets the second if it called a collective, and the third if its rankwise remembers a request to stop), last_words (a path, an
offset and a size: memory for an exception if the disk is full), count_mark and data_mark (each a path and an offset: where the
rank counts its collectives, and where it writes how long it waits for data), notes (null, or where this rank notes each
collective before it enters it: a path, the start of its part, and the sizes in it; agent/collective_check.py reads them).

The process stays single-threaded (OMP_NUM_THREADS=1, and it never runs a parallel region), because threads do not survive a
fork. Ranks are forked twice: the middle process announces them and exits, so the agent becomes their parent and alone reaps
them.
"""

import contextlib
import faulthandler
import functools
import gc
import json
import os
import re
import signal
import socket
import sys
import time
import types
from pathlib import Path

if not __package__:  # run by its path: make a package to import its few files from
    __package__ = "_rankwise.agent"
    folder = os.path.dirname(os.path.abspath(__file__))
    for package, path in (("_rankwise", os.path.dirname(folder)), (__package__, folder)):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [path]

from ..host import main_script  # noqa: TID252  # the package may have either name
from . import collective_notes, data_wait, exception_record, private_names, script_end

_PR_SET_PDEATHSIG = 1

_NOT_A_CHILD = (
    "rankwise: the interpreter is a script that starts Python as another process, so signals would not reach this rank; "
    "write exec before the command in the script\n"
)


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
        data_wait.DataWait(*spec["data_mark"]).prepare_later()
    else:
        spec = _serve(socket.socket(fileno=fd), agent)
        if spec is None:
            return
        distributed = collective_notes.Distributed(spec["notes"], spec["count_mark"])
        distributed.prepare()
        data_wait.DataWait(*spec["data_mark"]).prepare()
    _run(command, spec, distributed)


def _read_spec(fd):
    with os.fdopen(fd) as file:
        return json.load(file)


def _become_command(command):
    """Exec `command`. Its death with the parent stays set over an exec; the signal settings of Python are undone first."""
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
    module = command[0] == "-m"
    if not getattr(sys.flags, "safe_path", False):  # otherwise Python has put no folder before the others
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(command[0]))
    sys.argv = ["-m", *command[2:]] if module else list(command)


def _serve(channel, agent):
    """The work of the warm process. Returns a spec in each rank; returns None when the agent closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the agent ends this process
    _die_with(agent)
    gc.disable()  # a collection during the imports finds nothing to free, and takes a third of their time
    try:
        import torch

        if _may_compile(sys.argv):
            # The first optimizer of a process imports the compiler: do it here, once, not in every rank.
            torch.optim.SGD([torch.zeros(1)], lr=0.0)
    except BaseException as error:  # for example of a folder that is named like a library: the script will raise it too
        _send(channel, {"failed": f"{type(error).__name__}: {error}"})
        return None
    gc.freeze()  # the garbage collector of the ranks never touches these pages, so they stay shared
    _send(channel, {"ready": True})
    lines = channel.makefile("r")
    for line in lines:
        try:
            middle = os.fork()
        except OSError as error:
            _send(channel, {"failed": f"cannot fork: {error.strerror}"})
            continue
        if middle == 0:
            middle = os.getpid()
            spec = _fork_ranks(channel, json.loads(line)["ranks"])
            lines.close()
            channel.close()
            _become_rank(spec, agent, middle)
            return spec
        status = os.waitpid(middle, 0)[1]
        if status != 0:
            _send(channel, {"failed": f"the process that forks the ranks exited with status {status}"})
    return None


_COMPILER_VARIABLE = re.compile(rb"TORCH(INDUCTOR|DYNAMO|_COMPILE|_DYNAMO)_")
_COMPILES = re.compile(rb"(?<!\bre)\.compile\b|import\b.*\bcompile\b|Distributed")
_STEP = re.compile(rb"\b(opt\w*|scaler)\.step\b")
_WITHOUT_COMPILER = ("rankwise", "torch", "numpy", "scipy", "sklearn", "pandas", "h5py", "PIL", "matplotlib", "tqdm", "yaml")
_MOST_FILES = 100
_ENVIRONMENT_WRITE = re.compile(rb"environb?\s*(\[[^\]]*\]\s*=(?!=)|\|=|\.(update|setdefault|pop)\b)|\bputenv\b")


def _may_compile(command):
    """Whether the ranks may import torch's compiler, which takes as long as torch itself: optimizers, DDP and torch.compile do,
    but not optimizers that only rankwise steps.

    A guess from the text of the script and of its own modules. If it is wrong, each rank imports the compiler by itself, or
    this process imports it for nothing.
    """
    if command[0] == "-m":
        return True
    try:
        source, modules = _text(command[0])
    except OSError:  # the script will fail there too, and say why
        return True
    if _COMPILER_VARIABLE.search(source) and _ENVIRONMENT_WRITE.search(source):
        return False  # the compiler reads its variables when it is imported
    if _COMPILES.search(source):
        return True
    if ("rankwise" not in modules or _STEP.search(source)) and re.search(rb"optim|Trainer", source):
        return True
    return not modules <= {*sys.stdlib_module_names, *_WITHOUT_COMPILER}


def _text(script):
    """The text of the script and of the modules beside it that it imports, and the names of the other modules. If it has very
    many modules of its own, they count as others."""
    folder = Path(script).resolve().parent
    texts, others, seen, files = [], set(), set(), [Path(script)]
    while files:
        text = files.pop().read_bytes()
        texts.append(text)
        for name in _imported(text) - seen:
            seen.add(name)
            own = _package(folder / name) or [path for path in [folder / f"{name}.py"] if path.is_file()]
            if own and len(own) + len(files) + len(texts) <= _MOST_FILES:
                files += own
            else:
                others.add(name)
    return b"\n".join(texts), others


def _package(folder):
    """The files of a package and of the packages in it. Looks into no other folder: it may have a million images."""
    if not (folder / "__init__.py").is_file():
        return []
    inner = [file for child in folder.iterdir() if child.is_dir() for file in _package(child)]
    return [*folder.glob("*.py"), *inner]


def _imported(text):
    """The packages and modules that this text imports."""
    imports = re.findall(rb"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., ]+))", text, re.MULTILINE)
    words = {word.split()[0] for package, several in imports for word in (package or several).split(b",") if word.strip()}
    return {word.split(b".")[0].decode() for word in words}


def _fork_ranks(channel, specs):
    """In the middle process: fork all ranks, announce them, exit. Returns in each rank with its spec."""
    pids = []
    for spec in specs:
        try:
            pid = os.fork()
        except OSError as error:
            for begun in pids:  # the agent could not tell them from the ranks that it starts instead
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
    except (BrokenPipeError, ConnectionResetError):  # the agent is gone
        os._exit(0)


def _die_with(agent):
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)


def _is_below(agent, pid):
    with contextlib.suppress(OSError):
        while pid > 1:
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])  # its parent
            if pid == agent:
                return True
    return False


def _become_rank(spec, agent, middle=None):
    """Make a forked process look like a fresh one, and like this rank. `middle`: the process that has forked it."""
    while (parent := os.getppid()) != agent:  # set earlier, death with the parent would come at once
        if parent != middle:  # it is init or another process that inherits orphans: the agent was killed. Or it is a script.
            if _is_below(agent, parent):
                with open(spec["log"], "a") as log:
                    log.write(_NOT_A_CHILD)
            os._exit(1)
        time.sleep(0.0002)
    _die_with(agent)
    os.environ.clear()
    os.environ.update(spec["environment"])
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if not spec["stdin"]:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    # Flush each line: the agent shows what is in the file, and the output of a rank that is killed is not lost.
    for name, fd in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).reconfigure(line_buffering=True)
        assert getattr(sys, name).fileno() == fd
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=2)
    # The agent asks for stacks with this signal in a stall. Not USR1 or USR2: schedulers and scripts use those.
    stacks = os.open(spec["stacks"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
    faulthandler.register(signal.SIGRTMIN + 3, file=stacks, all_threads=True)
    _wait_for_go(*spec["go_mark"])
    sys.meta_path.insert(0, collective_notes.AfterImport("rankwise", functools.partial(_note_answers, spec["answers_mark"])))
    gc.enable()
    if "numpy" in sys.modules and spec["threads"]:
        _set_threads_of_blas(spec["threads"])
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(spec["threads"])
        sys.modules["torch"].default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as in a fresh process: different in each
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"]
        process.current_process().authkey = os.urandom(32)
        process.ORIGINAL_DIR = os.getcwd()


_BLAS = re.compile(r"openblas|mkl_rt|blis")
_SET_THREADS = (
    "scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "scipy_openblas_set_num_threads",
    "openblas_set_num_threads", "MKL_Set_Num_Threads", "bli_thread_set_num_threads",
)  # fmt: skip


def _set_threads_of_blas(threads):
    """numpy's library for matrices has taken its number of threads from the environment of the warm process."""
    with contextlib.suppress(OSError, ImportError), open("/proc/self/maps", errors="surrogateescape") as maps:
        import ctypes

        for path in {line.split(maxsplit=5)[-1].rstrip() for line in maps if _BLAS.search(line)}:
            library = ctypes.CDLL(path)
            for name in _SET_THREADS:
                if (function := getattr(library, name, None)) is not None:
                    function(threads)
                    break


def _note_answers(mark, package):
    """Set the mark as soon as the script's rankwise remembers requests to stop (rankwise/stop/early.py). Old versions do
    not."""
    if tell := getattr(getattr(package, "early", None), "tell", None):
        tell(functools.partial(_set_mark, *mark))


def _set_mark(page, offset):
    with contextlib.suppress(OSError), open(page, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"\1", offset)


def _wait_for_go(page, offset):
    """Wait until the agent knows this process. If the warm process dies before it has announced the ranks, the agent kills them
    and starts others; because they waited here, no script runs twice."""
    fd = os.open(page, os.O_RDONLY | os.O_CLOEXEC)
    while os.pread(fd, 1, offset) != b"\1":
        time.sleep(0.0005)
    os.close(fd)


def _run(command, spec, distributed):
    """Run the script as Python would, leave a record if it raises, and end this process as Python would."""
    _let_interrupts_in()
    interrupted, status, rank = False, 0, os.getpid()
    try:
        if command[0] == "-m":
            # runpy runs the module in `__main__`, which is this file: the module would overwrite the names that we need.
            sys.modules["__main__"] = types.ModuleType("__main__")
            private_names.run_module(command[1])
        else:
            main_script.run(command[0])
    except SystemExit as end:
        status = exception_record.exit_status(end)
    except KeyboardInterrupt as error:
        chosen = exception_record.print_exception(error, exception_record.as_text(error), brief=False)
        interrupted, status = chosen is None, chosen or 0
    except BaseException as error:
        # No call is outside this `try`: until leave() holds signals, a handler of the script may raise in each.
        try:
            status = _report(error, spec, rank)
        except BaseException as later:
            status = _report(exception_record.reason(error, later), spec, rank)
    if distributed.has_met_others():
        _set_mark(*spec["group_mark"])
    if not private_names.end_python():
        _leave_the_end_to_python(status, interrupted)
    output_lost = script_end.finish()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status or output_lost)


def _report(error, spec, rank):
    """Returns the status to exit with. In a process that the script has forked, the exception is not the rank's."""
    if os.getpid() != rank:
        exception_record.print_exception(error, exception_record.as_text(error), brief=False)
        os._exit(1)
    return exception_record.leave(error, spec)


def _leave_the_end_to_python(status, interrupted):
    """Let the interpreter shut down. It also tears down torch: this takes seconds, and gloo can hang in it."""
    if interrupted:
        sys.excepthook = lambda *_: None  # the traceback is already printed
        raise KeyboardInterrupt
    sys.exit(status)


def _let_interrupts_in():
    """Unblock SIGINT, which the agent blocked when it started this process. A SIGINT that is pending kills the process here: no
    line of the script has run yet."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, handler)


if __name__ == "__main__":
    main()
