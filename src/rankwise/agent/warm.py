"""The warm process: imports torch once, then forks a rank whenever its agent asks. Also starts a single rank by itself.

    python [flags] warm.py fork CHANNEL_FD AGENT_PID script.py args...     the warm process
    python [flags] warm.py once SPEC_FD    AGENT_PID script.py args...     one rank, nothing imported for it
    python         warm.py exec SPEC_FD    AGENT_PID command args...       one rank that is any command

This file is run by path with the script's own interpreter, which may have no rankwise: it imports the standard library
alone, and torch. Over CHANNEL go JSON lines; nothing executable crosses it.

    warm -> agent    {"ready": true} or {"failed": "why"}            after the imports
    agent -> warm    {"ranks": [spec, ...]}                          fork them
    warm -> agent    {"pids": [pid, ...]} or {"failed": "why"}

A spec: environment (all of it), log (path), exception (path), stacks (path), stdin (bool), threads (int or null), go_mark,
group_mark and answers_mark (each a path and an offset in it: the byte there is set when the rank may begin; the rank sets it if
it ever made a process group, and if its rankwise remembers a request to stop), notes (null, or where this rank notes each
collective before it enters it: a path, the start of its part, and the sizes in it; agent/collectives.py reads them).

The process stays single-threaded (OMP_NUM_THREADS=1, and it never runs a parallel region), as threads do not survive a
fork. Ranks are forked twice: the middle process announces them and ends, they fall to the agent, which alone reaps them.
"""

import atexit
import builtins
import contextlib
import faulthandler
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import io
import json
import mmap
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
_C10D = "torch.distributed.distributed_c10d"
_kept = []  # process groups that the script destroyed


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
        sys.meta_path.insert(0, _AfterImport(_C10D, functools.partial(_prepare_distributed, notes=spec["notes"])))
        _run(command, spec)
    spec = _serve(socket.socket(fileno=fd), agent)
    if spec is not None:
        _run(command, spec)


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
            _prepare_distributed(sys.modules[_C10D], spec["notes"])
            for name in _COLLECTIVES.keys() | {"destroy_process_group"}:
                setattr(sys.modules["torch.distributed"], name, getattr(sys.modules[_C10D], name))
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


def _made_a_group():
    """Whether this rank ever met the others: N ranks that never did were N separate runs."""
    c10d = sys.modules.get(_C10D)
    return c10d is not None and (bool(_kept) or bool(c10d._world.pg_map))


def _keep_process_groups(c10d):
    """Keep what `destroy_process_group` drops alive until the process ends, which is by `_exit`.

    The destructor of a gloo group joins its threads while it holds the GIL, and a thread of it may want the GIL: one in three
    scripts that destroy their group and then drop a DDP model hung there (pytorch#56297, #190489).
    """
    destroy = c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group=None):
        _kept.extend(c10d._world.pg_map)
        return destroy(group)

    c10d.destroy_process_group = destroy_process_group


class _AfterImport(importlib.abc.MetaPathFinder):
    """For a rank that imports torch by itself: `prepare(module)` as soon as it has."""

    def __init__(self, name, prepare):
        self._name = name
        self._prepare = prepare

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self._prepare(module)

        spec.loader.exec_module = exec_module
        return spec


# Each collective: the parameter whose tensors must be alike on all ranks (None: they may differ), and that of the root.
_COLLECTIVES = {
    "all_reduce": ("tensor", None),
    "broadcast": ("tensor", "src"),
    "reduce": ("tensor", "dst"),
    "all_gather": ("tensor_list", None),
    "all_gather_into_tensor": ("input_tensor", None),
    "reduce_scatter": ("output", None),
    "reduce_scatter_tensor": ("output", None),
    "gather": ("tensor", "dst"),
    "scatter": ("tensor", "src"),
    "all_to_all": (None, None),
    "all_to_all_single": (None, None),
    "barrier": (None, None),
    "monitored_barrier": (None, None),
    "all_gather_object": (None, None),
    "broadcast_object_list": (None, "src"),
    "gather_object": (None, "dst"),
    "scatter_object_list": (None, "src"),
}


def _prepare_distributed(c10d, notes):
    """What a rank's torch.distributed does besides: keep destroyed groups, and note collectives if that was asked for."""
    _keep_process_groups(c10d)
    if notes is not None:
        ring = _Notes(**notes)
        for name, (same, root) in _COLLECTIVES.items():
            setattr(c10d, name, _noted(c10d, name, same, root, ring))


class _Notes:
    """A ring in memory shared with the agent: a count of all notes so far, and the last few, each in a slot."""

    def __init__(self, path, start, header_bytes, slots, slot_bytes):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(fd, 0)
        os.close(fd)
        self._count = memoryview(self._map)[start : start + 8].cast("q")
        self._first = start + header_bytes
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self.inside = threading.local()  # object collectives call others
        self.numbers = {}  # collectives so far, by group

    def add(self, group, size, what, site):
        with self._lock:
            self.numbers[group] = number = self.numbers.get(group, 0) + 1
            head = f"{group}\t{number}\t{size}\t{what}\t"
            data = (head + site[len(head) - self._slot_bytes :]).encode()[: self._slot_bytes]
            start = self._first + self._count[0] % self._slots * self._slot_bytes
            self._map[start : start + self._slot_bytes] = data.ljust(self._slot_bytes, b"\0")
            self._count[0] += 1  # last: the agent reads what is counted


def _noted(c10d, name, same, root, notes):
    """The collective, noted by whoever calls it from outside of torch."""
    function = getattr(c10d, name)
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    op = parameters["op"].default if "op" in parameters else None
    torch = os.path.dirname(os.path.dirname(c10d.__file__)) + os.sep

    @functools.wraps(function)
    def noted(*args, **kwargs):
        if getattr(notes.inside, "now", False):
            return function(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        group = given.get("group") or (c10d.group.WORLD if c10d.is_initialized() else None)
        if group is not None and group != c10d.GroupMember.NON_GROUP_MEMBER:
            words = [str(given.get("op", op)).rpartition(".")[2].lower()] if op is not None else []
            words += [_described(given.get(same))] if same is not None else []
            if root is not None:
                place = given.get(root, given.get(f"group_{root}", 0))
                words.append(f"{root} {place}")
            notes.add(group.group_name, group.size(), f"{name}({', '.join(words)})", _site(torch))
        notes.inside.now = True
        try:
            return function(*args, **kwargs)
        finally:
            notes.inside.now = False

    return noted


def _described(value):
    """`float32[4, 8]`, or `2 x float32[4, 8]` for a list."""
    if isinstance(value, (list, tuple)):
        return f"{len(value)} x {_described(value[0])}" if value else "nothing"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if hasattr(value, "dtype") else str(value)


def _site(torch):
    """`file:line` of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename.startswith(torch) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


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
    sys.meta_path.insert(0, _AfterImport("rankwise", functools.partial(_note_answers, spec["answers_mark"])))
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
    """Whether a request to stop is remembered from now on (rankwise/early.py): a version without it remembers none."""
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


def _run(command, spec):
    """Run the script as Python would, leave evidence if it raises, and end this process as Python would."""
    _let_interrupts_in()
    try:
        if command[0] == "-m":
            # It takes what `__main__` is: this file, whose names the module's would replace.
            sys.modules["__main__"] = types.ModuleType("__main__")
            runpy._run_module_as_main(command[1])
        else:
            _run_script(command[0])
        status = 0
    except SystemExit as end:
        status = _exit_status(end)
    except KeyboardInterrupt as error:
        _print_exception(error, _as_text(error), brief=False)
        _end_of_python(spec)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        status = _exception_status(error, spec)
    os._exit(_end_of_python(spec) or status)


def _let_interrupts_in():
    """The agent has started this process with SIGINT blocked. One that came while it was made ready ends it here: there is no
    line of the script that it could interrupt."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, handler)


def _run_script(path):
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = builtins
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__cached__ = None
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _exit_status(end):
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _exception_status(error, spec):
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
    with contextlib.suppress(OSError), open(temporary, "w") as file:
        json.dump(record, file)
        file.close()
        os.replace(temporary, spec["exception"])
    _print_exception(error, text, brief)
    return status if brief else 1


def _without_our_frames(tb):
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while tb is not None and (tb.tb_frame.f_code.co_filename in ours or "__tracebackhide__" in tb.tb_frame.f_globals):
        tb = tb.tb_next
    return tb


def _where(error):
    """The last line of the script itself that was running: `train.py:61`."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == script]
    return f"{os.path.basename(script)}:{frames[-1].lineno}" if frames else None


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
    print(text, end="", file=sys.stderr)


def _end_of_python(spec):
    """What the interpreter does at its end, up to where torch would be taken apart (seconds, and gloo can hang there)."""
    status = 0
    if _made_a_group():
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
