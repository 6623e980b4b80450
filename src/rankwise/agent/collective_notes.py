"""Wrappers around a rank's `torch.distributed`: they count collectives, and note each one before the rank enters it.

    distributed = Distributed(notes=spec["notes"], count_mark=spec["count_mark"])
    distributed.prepare()        # if torch is imported already
    distributed.prepare_later()  # if the script may import it

fork_server.py loads this file by its path, in the script's own interpreter: it imports only the standard library and files of
this folder.

The count is for the agent, which takes a new collective as a sign of progress. It is torch's own sequence number, which a
thread reads twice a second: it costs nothing per collective, and it includes what DDP's reducer sends from C++, which Python
does not see. Those in memory that ranks of one host share are counted by rankwise/dist/shared_memory.py.

The notes are for `--check-collectives` (collective_check.py reads them). They contain the functions of `torch.distributed`, and
two collectives of DDP that Python can predict: a backward pass in which DDP's reducer sends gradients, and the broadcast of its
buffers in a forward pass.
"""

import _thread
import contextlib
import functools
import importlib.util
import inspect
import mmap
import os
import signal
import sys
import threading
import time

from ..host import listener  # noqa: TID252  # the package may have either name
from . import private_names

_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.distributed"
_COUNT_EVERY_S = 0.5
_MEMORY, _JOINING = "rankwise.dist.shared_memory", "rankwise.dist.joining"
_TRANSPARENT = ("rankwise.dist.comm", _MEMORY, "rankwise.dist.guards", "rankwise.host.arguments")
"""rankwise modules whose functions are collectives that users call directly, and what these use: the note shows the line that
calls them."""

_WHAT_CHARS, _CALLER_CHARS = 96, 40
"""The most of a note that these two parts may take, so that the place of the call remains complete."""

_OURS = (__file__, private_names.__file__)

# For each collective: the parameter whose tensors must match on all ranks (None: they may differ), and the root's parameter.
COLLECTIVES = {
    "all_reduce": ("tensor", None),
    "all_reduce_coalesced": ("tensors", None),
    "broadcast": ("tensor", "src"),
    "reduce": ("tensor", "dst"),
    "all_gather": ("tensor_list", None),
    "all_gather_into_tensor": ("input_tensor", None),
    "all_gather_coalesced": ("input_tensor_list", None),
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
_DTYPE_ALONE = {"all_to_all": "output_tensor_list", "all_to_all_single": "output"}
"""For collectives whose shapes may differ between ranks: the parameter whose tensors must all have the same dtype."""


class Distributed:
    """The wrappers of one rank. `notes`: where to write notes (None: write none). `count_mark`: a path, and the offset of the
    count in it."""

    def __init__(self, notes, count_mark):
        self._notes = Notes(**notes) if notes is not None else None
        self._count_mark = count_mark
        self._kept = []  # process groups that the script destroyed
        self._counting = False
        self._armed = {}  # by DDP reducer that will send in the next backward pass: its group

    def has_met_others(self):
        """Whether this rank has called a collective: N ranks that never did were N separate runs. Those that connect the ranks
        do not count."""
        c10d = sys.modules.get(_C10D)
        groups = [*self._kept, *private_names.groups(c10d)] if c10d is not None else []
        if not all(map(private_names.counts, groups)):
            return True  # nobody knows
        to_connect = getattr(sys.modules.get(_JOINING), "sent", 0)
        return getattr(sys.modules.get(_MEMORY), "begun", 0) + sum(map(private_names.begun, groups)) > to_connect

    def prepare(self):
        """Call it in a process that has imported torch."""
        self._prepare_c10d(sys.modules[_C10D])
        for name in COLLECTIVES.keys() | {"destroy_process_group"}:
            if hasattr(sys.modules[_C10D], name):
                setattr(sys.modules["torch.distributed"], name, getattr(sys.modules[_C10D], name))
        if self._notes is not None:
            self._prepare_ddp(sys.modules[_DDP])
            self._prepare_memory_later()

    def prepare_later(self):
        """Call it in a process whose script may import torch later."""
        sys.meta_path.insert(0, AfterImport(_C10D, self._prepare_c10d))
        if self._notes is not None:
            sys.meta_path.insert(0, AfterImport(_DDP, self._prepare_ddp))
            self._prepare_memory_later()

    def _prepare_c10d(self, c10d):
        _wait_for_rank_0(c10d)
        self._keep_process_groups(c10d)
        self._count_from_the_first_group(c10d)
        for name, (same, root) in COLLECTIVES.items() if self._notes is not None else ():
            if hasattr(c10d, name):
                setattr(c10d, name, self._noted(c10d, name, same, root))

    def _keep_process_groups(self, c10d):
        """Keep destroyed process groups alive until the process exits, which it does with `_exit`.

        The destructor of a gloo group joins its threads while it holds the GIL, and one of these threads may need the GIL: one
        in three scripts that destroy their group and then drop a DDP model hung there (pytorch#56297, #190489).
        """
        destroy = c10d.destroy_process_group

        @functools.wraps(destroy)
        def destroy_process_group(group=None):
            self._kept += [one for one in private_names.groups(c10d) if one not in self._kept]
            return destroy(group)

        c10d.destroy_process_group = destroy_process_group

    # --- the count

    def _count_from_the_first_group(self, c10d):
        """Start the counting thread when the first group is made; a rank that makes none has no such thread."""

        def count():
            if not self._counting:
                self._counting = True
                # Not threading.Thread: the script would see it in threading.enumerate().
                _thread.start_new_thread(_count, (c10d, *self._count_mark))

        private_names.before_each_group(c10d, count)

    # --- the notes

    def _noted(self, c10d, name, same, root):
        """A wrapper that notes the collective when it is called from outside torch."""
        function, notes = getattr(c10d, name), self._notes
        parameters = inspect.signature(function).parameters
        names = list(parameters)
        op = parameters["op"].default if "op" in parameters else None

        @functools.wraps(function)
        def noted(*args, **kwargs):
            if getattr(notes.inside, "now", False):
                return function(*args, **kwargs)
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            group = given.get("group") or (c10d.group.WORLD if c10d.is_initialized() else None)
            if group is not None and group != c10d.GroupMember.NON_GROUP_MEMBER:
                words = [str(given.get("op", op)).rpartition(".")[2].lower()] if op is not None else []
                words += [_described(given.get(same))] if same is not None else []
                words += [_dtype(given.get(_DTYPE_ALONE[name]))] if name in _DTYPE_ALONE else []
                if root is not None:
                    words.append(_root(c10d, group, root, given))
                notes.add(group.group_name, group.size(), f"{name}({', '.join(words)})", *_site())
            notes.inside.now = True
            try:
                return function(*args, **kwargs)
            finally:
                notes.inside.now = False

        return noted

    def _prepare_memory_later(self):
        """Note the collectives in shared memory. A warm process may have imported the module already."""
        if _MEMORY in sys.modules:
            self._prepare_memory(sys.modules[_MEMORY])
        else:
            sys.meta_path.insert(0, AfterImport(_MEMORY, self._prepare_memory))

    def _prepare_memory(self, module):
        described = {
            "all_reduce": lambda tensor, op="sum": f"{op}, {_described(tensor)}",
            "broadcast": lambda tensor, src: f"{_described(tensor)}, src {src}",
            "all_gather_object": lambda data, patient=False: "",
            "gather_object": lambda data, dst: f"dst {dst}",
            "broadcast_object": lambda data, src, patient=False: f"src {src}",
            "barrier": lambda: "",
        }
        for name, describe in described.items():
            setattr(module.SharedMemory, name, self._noted_in_memory(getattr(module.SharedMemory, name), name, describe))

    def _noted_in_memory(self, function, name, describe):
        @functools.wraps(function)
        def noted(this, *args, **kwargs):
            world = sys.modules[_C10D].group.WORLD
            self._notes.add(world.group_name, world.size(), f"{name}({describe(*args, **kwargs)})", *_site())
            return function(this, *args, **kwargs)

        return noted

    def _prepare_ddp(self, ddp):
        """Note the collectives of DDP itself, which its reducer sends from C++."""
        dist, torch = sys.modules["torch.distributed"], sys.modules["torch"]
        if not hasattr(dist, "Reducer"):
            return
        self._note_backward_passes(dist.Reducer, torch)

        def note(group, tensors):
            self._notes.add(group.group_name, group.size(), f"broadcast by DDP({len(tensors)} tensors)", *_site())

        private_names.before_each_broadcast(dist, note)
        self._pass_over_joined(ddp.Join)

    def _pass_over_joined(self, join):
        """Note nothing inside `with model.join()`: there, ranks without samples rightly answer the others from different
        lines."""
        enter, leave, notes = join.__enter__, join.__exit__, self._notes

        @functools.wraps(enter)
        def entered(this):
            notes.paused = True
            return enter(this)

        @functools.wraps(leave)
        def left(this, *error):
            try:
                return leave(this, *error)
            finally:
                notes.paused = False

        join.__enter__, join.__exit__ = entered, left

    def _note_backward_passes(self, reducer, torch):
        """Note the backward passes in which a reducer sends: those that DDP's forward prepares it for, which it does not in
        `no_sync`."""
        make, prepare = reducer.__init__, reducer.prepare_for_backward
        groups = {}

        @functools.wraps(make)
        def init(this, *args, **kwargs):
            make(this, *args, **kwargs)
            given = (*args, *kwargs.values())
            groups[id(this)] = next(one for one in given if isinstance(one, torch.distributed.ProcessGroup))

        @functools.wraps(prepare)
        def prepare_for_backward(this, *args, **kwargs):
            self._armed[id(this)] = groups.get(id(this))
            return prepare(this, *args, **kwargs)

        backward = torch.autograd.backward

        @functools.wraps(backward)
        def noted_backward(*args, **kwargs):
            while self._armed:
                _, group = self._armed.popitem()
                if group is not None:
                    self._notes.add(group.group_name, group.size(), "backward() of a DDP model", *_site())
            return backward(*args, **kwargs)

        reducer.__init__, reducer.prepare_for_backward = init, prepare_for_backward
        torch.autograd.backward = noted_backward


class AfterImport:
    """A finder of modules that calls `prepare(module)` as soon as the module `name` is imported."""

    def __init__(self, name, prepare):
        self._name = name
        self._prepare = prepare

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self._prepare(module)

        spec.loader.exec_module = exec_module
        return spec


def _wait_for_rank_0(c10d):
    """From now on, before another rank than 0 connects to rank 0's store: host/listener.py says why."""
    import urllib.parse  # torch has imported it; a rank without torch need not

    connect = getattr(c10d, "rendezvous", None)
    if connect is None:  # a release that does not import it there
        return

    @functools.wraps(connect)
    def rendezvous(url, rank=-1, *args, **kwargs):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # torch says what is missing or wrong
            place = urllib.parse.urlsplit(url)
            if place.scheme in ("env", "tcp") and (rank if rank >= 0 else int(os.environ["RANK"])) > 0:
                if place.scheme == "tcp":
                    listener.wait_for(place.hostname, place.port)
                else:
                    listener.wait_for(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return connect(url, rank, *args, **kwargs)

    c10d.rendezvous = rendezvous


def _count(c10d, path, offset):
    """The thread that counts. It blocks all signals: the main thread's handlers answer them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    page = mmap.mmap(fd, 0)
    os.close(fd)
    word = memoryview(page)[offset : offset + 8].cast("q")
    while True:
        in_memory = getattr(sys.modules.get(_MEMORY), "begun", 0)
        word[0] = in_memory + sum(private_names.begun(group) for group in private_names.groups(c10d))
        time.sleep(_COUNT_EVERY_S)


class Notes:
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
        self.inside = threading.local()  # whether this thread is inside a noted collective: object collectives call others
        self.numbers = {}  # collectives so far, by group
        self.paused = False

    def add(self, group, size, what, site, caller=""):
        """`site`: `file:line`; different sites are different calls. `caller`: the user's line, if it is another one."""
        if self.paused:
            return
        with self._lock:
            self.numbers[group] = number = self.numbers.get(group, 0) + 1
            head = f"{group}\t{number}\t{size}\t{what[:_WHAT_CHARS]}\t{caller[-_CALLER_CHARS:]}\t".encode(errors="replace")
            place = site.encode(errors="replace")  # a path need not be UTF-8
            data = (head + place[len(head) - self._slot_bytes :])[: self._slot_bytes]
            start = self._first + self._count[0] % self._slots * self._slot_bytes
            self._map[start : start + self._slot_bytes] = data.ljust(self._slot_bytes, b"\0")
            self._count[0] += 1  # last: the agent reads as many notes as are counted


def _described(value):
    """`float32[4, 8]`, or `2 x float32[4, 8]` for a list; the name of its type for anything else, which torch will refuse."""
    if isinstance(value, (list, tuple)):
        return f"{len(value)} x {_described(value[0])}" if value else "nothing"
    is_tensor = hasattr(value, "dtype") and hasattr(value, "shape")
    return f"{_dtype(value)}{list(value.shape)}" if is_tensor else type(value).__name__


def _dtype(value):
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return str(getattr(first, "dtype", type(first).__name__)).removeprefix("torch.")


def _root(c10d, group, root, given):
    """`src 0`: the rank in the world, also if the script gave its rank in the group."""
    if given.get(root) is not None:
        return f"{root} {given[root] if hasattr(given[root], '__index__') else type(given[root]).__name__}"
    inside = given.get(f"group_{root}")
    return f"{root} {c10d.get_global_rank(group, inside) if inside is not None else 0}"


def _site():
    """Where the script calls the collective: (`file:line`, the user's line if it is another one).

    `file:line` is the innermost frame outside torch, outside this file, and outside rankwise's own collectives.
    """
    frame = inspect.currentframe()
    torch = os.path.dirname(sys.modules["torch"].__file__) + os.sep
    while frame is not None and _is_passed_over(frame, torch):
        frame = frame.f_back
    first = frame
    while frame is not None and (_is_passed_over(frame, torch) or _module(frame).startswith("rankwise.")):
        frame = frame.f_back
    if first is frame or frame is None:
        return f"{first.f_code.co_filename}:{first.f_lineno}" if first is not None else "?", ""
    caller = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return f"{_module(first).replace('.', '/')}.py:{first.f_lineno}", caller


def _is_passed_over(frame, torch):
    file, module = frame.f_code.co_filename, _module(frame)
    return file in _OURS or file.startswith(torch) or module in _TRANSPARENT or module in ("contextlib", "functools")


def _module(frame):
    return str(frame.f_globals.get("__name__", ""))
