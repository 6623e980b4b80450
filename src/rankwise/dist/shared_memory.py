"""Collectives of ranks on one host, for CPU tensors and for bytes, through memory that they share. They take a tenth (small
tensors) to a half (large ones) of the time that gloo takes, which sends everything over TCP.

    memory = connect(rank, ranks, timeout_s, exchange)     # None: use torch's collectives
    memory.all_reduce(tensor, "sum");   memory.barrier()

Each rank has two slots in a file without a name, which the kernel removes with the last rank. In a collective a rank writes
into its slot, waits for the others, and reads theirs. Collectives use the two slots in turn: a rank that comes to the next
collective has read all slots of this one, and nobody writes into them again before all ranks have come to the next one.

Ranks wait in the rounds of a dissemination barrier (Hensgen, Finkel and Manber 1988), over Unix sockets: in round k, rank r
sends a byte to rank r + 2^k and waits for one from rank r - 2^k. The kernel closes the sockets of a rank that dies, so nobody
waits for it until the time limit.

An exception of a signal handler (Ctrl-C) waits until its collective is complete, because the others need this rank. If they
have left it for another collective (each in its `except KeyboardInterrupt`), this rank raises the exception and follows them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch

from rankwise.errors import CollectiveError
from rankwise.host import network
from rankwise.host.text import listed, numbered

T = TypeVar("T")

begun = 0
"""How many collectives this process has begun. The agent reads it (agent/collective_notes.py): a new one shows progress."""

_NAME_BYTES = 16
_CONNECT_S = 30.0  # a wait that depends on no work of the script
_LARGEST_SLOT, _SMALLEST_SLOT, _ALL_SLOTS = 4 << 20, 1 << 16, 256 << 20  # bytes
_WHOLE = 1 << 20  # bytes: of a larger piece, each of three or more ranks adds one part, and copies the other parts
_KEPT = 64  # sets of views

_OPS: dict[str, Callable[..., Any]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
_CALLS = [*_OPS, "broadcast", "barrier", "all_gather_object", "broadcast_object", "gather_object"]
_DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_CALL_BITS, _DTYPE_BITS, _ROOT_BITS = 59, 52, 40
_MOST_RANKS = 1 << _DTYPE_BITS - _ROOT_BITS
_ELEMENTS = (1 << _ROOT_BITS) - 1
"""What a rank calls is one integer: which call, which dtype, `src` or `dst`, and the number of elements."""
_ROOT_OF = {"broadcast": "src", "broadcast_object": "src", "gather_object": "dst"}
_LONGEST_S = 2e6  # the kernel counts a wait in milliseconds, in 31 bits
_NUMBERS = 4  # of each rank: what it calls, in both slots; how many times it has come; whether a handler has raised there

_HELLO = struct.Struct("qq")  # the rank that connects, and the round


class Round(NamedTuple):
    """One round of the barrier."""

    to: socket.socket
    source: socket.socket
    who: int
    """The rank at `source`."""


# --- at the start


def connect(rank: int, ranks: int, timeout_s: float, exchange: Callable[[bytes], list[bytes]]) -> SharedMemory | None:
    """Collective. Connect to the other ranks. None on all ranks if they are not on one host, or if one cannot share memory.

    `exchange`: a collective that returns what each rank gives, as long on each. `timeout_s` limits each wait for another rank.
    """
    with ExitStack() as passing, ExitStack() as kept:
        name, possible = secrets.token_bytes(_NAME_BYTES), True
        try:
            door, file = _listen(name, passing), _new_file(ranks, passing)
        except OSError:
            possible = False
        here = hashlib.sha256(f"{network.home()} {os.geteuid()}".encode()).digest()
        told = exchange(here + bytes([possible]) + name)
        made = None
        if all(one.startswith(here + b"\1") for one in told):
            try:
                file, rounds = _meet(rank, [one[len(here) + 1 :] for one in told], door, file, passing, kept)
                made = SharedMemory(rank, ranks, file, rounds, timeout_s)
            except (OSError, ValueError):
                passing.close()  # a rank that connects to this one notices it at once
                kept.close()
        if exchange(bytes([made is not None])) != [b"\1"] * ranks:
            return None
        kept.pop_all()
    return made


def _address(name: bytes) -> bytes:
    """The address of a socket that has no file, and that only processes in this host's network namespace can reach."""
    return b"\0rankwise-" + name.hex().encode()


def _listen(name: bytes, passing: ExitStack) -> socket.socket:
    door = passing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    door.bind(_address(name))
    door.listen(64)
    door.settimeout(_CONNECT_S)
    return door


def _new_file(ranks: int, passing: ExitStack) -> int:
    """A file in memory. Each rank tries this, so that all know whether it is possible; that of rank 0 is used."""
    if not hasattr(os, "memfd_create") or ranks > _MOST_RANKS:
        raise OSError  # a Python that was built for an old system
    file = os.memfd_create("rankwise-collectives")
    passing.callback(os.close, file)
    os.ftruncate(file, _layout(ranks)[1])
    return file


def _meet(
    rank: int, names: Sequence[bytes], door: socket.socket, file: int, passing: ExitStack, kept: ExitStack
) -> tuple[int, list[Round]]:
    """The file of rank 0, and the rounds. Raises OSError or ValueError if that is not possible."""
    ranks = len(names)
    came: dict[tuple[int, int], socket.socket] = {}
    rounds = []
    events = select.poll()
    events.register(door, select.POLLIN)
    for number in range((ranks - 1).bit_length()):
        step = 1 << number
        after, before = (rank + step) % ranks, (rank - step) % ranks
        to = kept.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        to.settimeout(_CONNECT_S)
        to.connect(_address(names[after]))
        events.register(to, 0)  # nobody sends here: the only event is that the rank has closed it
        has_it = rank < step and rank + step < ranks  # in each round, the ranks with the file send it to as many others
        socket.send_fds(to, [_HELLO.pack(rank, number)], [file] if has_it else [])
        while (before, number) not in came:
            if [number for number, _ in events.poll(_CONNECT_S * 1e3)] != [door.fileno()]:
                raise OSError  # a rank has given up
            source = kept.enter_context(door.accept()[0])
            source.settimeout(_CONNECT_S)
            hello, sent, _, _ = socket.recv_fds(source, _HELLO.size, 1)
            for one in sent:
                passing.callback(os.close, one)
            if _user_at(source) == os.geteuid():
                came[_HELLO.unpack(hello.ljust(_HELLO.size))] = source
                file = sent[0] if sent else file
        rounds.append(Round(to, came[before, number], before))
    return file, rounds


def _user_at(connection: socket.socket) -> int:
    _, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def _layout(ranks: int) -> tuple[int, int]:
    """The bytes of a slot, and of the whole file: a page of numbers, then two slots of each rank. Only what is written takes
    memory."""
    slot = max(_SMALLEST_SLOT, min(_LARGEST_SLOT, _ALL_SLOTS // (2 * ranks) // mmap.PAGESIZE * mmap.PAGESIZE))
    return slot, _numbers_bytes(ranks) + 2 * ranks * slot


def _numbers_bytes(ranks: int) -> int:
    """The bytes of the numbers of all ranks."""
    return -(-_NUMBERS * 8 * ranks // mmap.PAGESIZE) * mmap.PAGESIZE


# --- collectives


class SharedMemory:
    """The memory and the connections of one rank. Each public method is a collective. It raises CollectiveError if another rank
    has exited, does not come in time, or calls something else; only in the last case the next collective may succeed."""

    def __init__(self, rank: int, ranks: int, file: int, rounds: Sequence[Round], timeout_s: float) -> None:
        self._rank, self._ranks, self._rounds, self._timeout_s = rank, ranks, rounds, timeout_s
        self._slot_bytes, size = _layout(ranks)
        self._memory, self._first = mmap.mmap(file, size), _numbers_bytes(ranks)
        numbers = memoryview(self._memory)[: _NUMBERS * 8 * ranks].cast("q")
        first, second, self._came, self._raised = (numbers[at * ranks : (at + 1) * ranks] for at in range(_NUMBERS))
        self._calls, self._turn = (first, second), 0
        self._views: dict[tuple[torch.dtype, int], list[list[torch.Tensor]]] = {}
        self._reductions: dict[tuple[str, torch.dtype], int] = {}
        self._lock = threading.RLock()
        self._is_inside, self._why_closed = False, ""
        self._postponed: BaseException | None = None
        self._steps: list[tuple[Any, ...]] = []
        for each in rounds:
            each.to.settimeout(None)
            each.source.settimeout(min(timeout_s, _LONGEST_S))
            self._steps += [(each.to.send, (b".",), (socket.MSG_NOSIGNAL,)), (each.source.recv, (1,))]
        os.register_at_fork(after_in_child=functools.partial(_forked, weakref.ref(self)))
        weakref.finalize(self, _close, rounds)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Reduce a contiguous tensor in place; `op`: sum, min or max. All ranks get the same bits: those of adding one rank
        after the other, from rank 0. Raises what torch raises if it has no such operation for this dtype."""
        flat = tensor.view(-1)
        combine, most = _OPS[op], self._slot_bytes // flat.element_size()
        call = self._reductions.get((op, flat.dtype)) or self._reduction(op, flat.dtype)
        call |= len(flat)
        with self._lock, self, _writes_to(flat):
            for piece in torch.split(flat, most) if len(flat) > most else (flat,):
                slots = self._surely(self._written, piece)
                self._enter(call)
                if self._ranks == 2 or piece.nbytes <= _WHOLE:
                    self._surely(_combine, combine, slots, piece)
                else:
                    self._combine_in_parts(combine, slots, piece, call)

    def _reduction(self, op: str, dtype: torch.dtype) -> int:
        """What a rank calls, without the number of elements. Raises what torch raises if it has no such operation."""
        with torch.inference_mode(False):
            _OPS[op](torch.empty(1, dtype=dtype), torch.empty(1, dtype=dtype))
        call = self._reductions[op, dtype] = _CALLS.index(op) << _CALL_BITS | _CODES[dtype] << _DTYPE_BITS
        return call

    def _combine_in_parts(
        self, combine: Callable[..., Any], slots: Sequence[torch.Tensor], piece: torch.Tensor, call: int
    ) -> None:
        """Each rank computes one part, and copies it to its slot: the others no longer read that part there."""
        length = -(-len(piece) // self._ranks)
        parts = [slice(rank * length, (rank + 1) * length) for rank in range(self._ranks)]
        mine = parts[self._rank]
        self._surely(_combine, combine, [slot[mine] for slot in slots], piece[mine])
        self._surely(slots[self._rank][mine].copy_, piece[mine])
        self._wait(call)
        for part, slot in zip(parts, slots, strict=True):
            if part is not mine:
                self._surely(piece[part].copy_, slot[part])

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Set a contiguous tensor to that of rank `src`."""
        flat = tensor.view(-1)
        call, most = _of_bytes("broadcast", src, len(flat)), self._slot_bytes // flat.element_size()
        call |= _CODES[flat.dtype] << _DTYPE_BITS
        with self._lock, self, _writes_to(flat):
            for piece in torch.split(flat, most):
                slots = self._surely(self._written if self._rank == src else self._slots, piece)
                self._enter(call)
                if self._rank != src:
                    self._surely(piece.copy_, slots[src])

    def all_gather_object(self, data: bytes, patient: bool = False) -> list[bytes]:
        """Return the data of all ranks. `patient`: wait for a rank as long as it is alive."""
        return self._exchange(_of_bytes("all_gather_object", 0, len(data)), data, range(self._ranks), patient)

    def gather_object(self, data: bytes, dst: int) -> list[bytes]:
        """Return the data of all ranks on rank `dst`; an empty list on the others."""
        call = _of_bytes("gather_object", dst, len(data))
        return self._exchange(call, data, range(self._ranks) if self._rank == dst else ())

    def broadcast_object(self, data: bytes, src: int, patient: bool = False) -> bytes:
        """Return the data of rank `src`; that of the other ranks is not used. `patient`: wait as long as it is alive."""
        sent = data if self._rank == src else b""
        return self._exchange(_of_bytes("broadcast_object", src, len(sent)), sent, [src], patient)[0]

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        with self._lock, self:
            self._enter(_of_bytes("barrier", 0, 0))

    # --- inside a collective

    def _exchange(self, call: int, data: bytes, wanted: Sequence[int], patient: bool = False) -> list[bytes]:
        """The data of the wanted ranks, which need not be the same on all ranks."""
        found: list[list[bytes]] = []
        start, longest = 0, 1
        with self._lock, self:
            while start < longest:
                slots = [self._first + (self._turn * self._ranks + rank) * self._slot_bytes for rank in range(self._ranks)]
                piece = data[start : start + self._slot_bytes]
                self._memory[slots[self._rank] : slots[self._rank] + len(piece)] = piece
                lengths = self._enter(call, are_lengths=True, patient=patient)
                ends = [
                    slot + max(0, min(length - start, self._slot_bytes)) for slot, length in zip(slots, lengths, strict=True)
                ]
                found.append([self._memory[slots[rank] : ends[rank]] for rank in wanted])
                start, longest = start + self._slot_bytes, max(lengths)
        return found[0] if len(found) == 1 else list(map(b"".join, zip(*found, strict=True)))

    def __enter__(self) -> None:
        """Begin a collective. It comes after the lock, which an exception of a signal handler must not leave locked."""
        global begun
        if self._is_inside:
            raise CollectiveError(
                "a signal handler has called a collective while its rank was in another one; set a variable in the handler, "
                "and call the collective at the end of a step"
            )
        if self._why_closed:
            raise CollectiveError(self._why_closed)
        self._is_inside = True
        begun += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        """After an exception, the other ranks must not wait for this one."""
        postponed, self._postponed = self._postponed, None
        if kind is not None and not isinstance(error, MismatchError):
            self.close()
        self._is_inside = False
        if postponed is not None:
            raise postponed

    def close(self, why: str = "an exception has ended an earlier collective of this rank, so it can call no other") -> None:
        """Not a collective. Others that wait for this rank raise CollectiveError, and so does its next collective."""
        self._why_closed = why
        _close(self._rounds)

    def _surely(self, step: Callable[..., T], *arguments: Any) -> T:
        """Do a step that may be repeated, even if a signal handler raises an exception in it."""
        try:
            return step(*arguments)
        except BaseException as error:
            self._postpone(error)
        return step(*arguments)

    def _postpone(self, error: BaseException) -> None:
        """Raise an exception when this collective is complete: the others need this rank. A second one ends the collective."""
        if self._postponed is not None:
            raise error
        self._postponed = error

    def _written(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Write into the slot of this rank. Returns all slots."""
        slots = self._slots(piece)
        slots[self._rank].copy_(piece)
        return slots

    def _slots(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Where each rank writes in this turn, as tensors like this one."""
        key = (piece.dtype, len(piece))
        if (views := self._views.get(key)) is None:
            if len(self._views) == _KEPT:
                self._views.clear()
            begins = [self._first + number * self._slot_bytes for number in range(2 * self._ranks)]
            with torch.inference_mode(False):
                slot = self._slot_bytes // piece.element_size()
                every = [
                    torch.frombuffer(self._memory, dtype=piece.dtype, count=slot, offset=at)[: len(piece)] for at in begins
                ]
            self._views[key] = views = [every[: self._ranks], every[self._ranks :]]
        return views[self._turn]

    def _enter(self, call: int, are_lengths: bool = False, patient: bool = False) -> list[int]:
        """Wait until all ranks have written, and compare what they call; from now on, they write into the other slots.
        `are_lengths`: the ranks may have different numbers of elements. Returns these."""
        calls = self._calls[self._turn]
        while True:
            calls[self._rank] = call
            self._wait(call, patient)
            told = calls.tolist()
            if told.count(call) == self._ranks or (are_lengths and len({one & ~_ELEMENTS for one in told}) == 1):
                self._turn = 1 - self._turn
                return [one & _ELEMENTS for one in told] if are_lengths else []
            has_raised = self._raised[self._rank] = int(self._postponed is not None)
            self._wait(call)
            if has_raised or not any(self._raised):
                raise MismatchError(_differing(told))
            # Those in which a signal handler has raised leave their collective; their next one should be this one.

    def _wait(self, call: int, patient: bool = False) -> None:
        """Return when all ranks have called this."""
        self._came[self._rank] += 1
        done: list[Any] = []
        while len(done) < len(self._steps):
            try:
                for step in self._steps[len(done) :]:
                    done += map(*step)  # notes the step at once: no signal handler comes in between
                    if not done[-1]:
                        done.pop()
                        raise ConnectionResetError
            except BaseException as error:
                if not isinstance(error, OSError) or _is_of_handler(error):
                    self._postpone(error)
                elif not isinstance(error, TimeoutError):
                    raise CollectiveError(self._gone(call, self._rounds[len(done) // 2].who)) from None
                elif not patient:
                    raise CollectiveError(self._too_late(call)) from None

    def _gone(self, call: int, who: int) -> str:
        late = self._late()
        return (
            f"rank {who} has exited, or an exception has ended its collective, while rank {self._rank} waited for it in "
            f"{_name(call)} (Connection closed by peer)"
            + (f"; {numbered('rank', late, 8)} did not come" if late and who not in late else "")
        )

    def _late(self) -> list[int]:
        """The ranks that have not come so many times as this one."""
        here = self._came[self._rank]
        return [rank for rank, number in enumerate(self._came) if number < here]

    def _too_late(self, call: int) -> str:
        who = numbered("rank", late, 8) if (late := self._late()) else "the other ranks"
        return (
            f"Timed out waiting {self._timeout_s:g} s for {who} in {_name(call)}; if the work between two collectives takes "
            "longer, give rankwise.init(timeout_s=...)"
        )


def _forked(memory: weakref.ref[SharedMemory]) -> None:
    """In a process that a rank has forked (a loader worker, for example). It may live longer than the rank, and nobody must
    wait for it."""
    if (inherited := memory()) is not None:
        inherited._lock = threading.RLock()  # another thread of the rank may have had it
        inherited.close("this process was forked by a rank, and cannot call a collective for it")


def _close(rounds: Sequence[Round]) -> None:
    for each in rounds:
        each.to.close()
        each.source.close()


def _is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler in Python raised this: then its frame lies below that of the function which waited."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


class MismatchError(CollectiveError):
    """All ranks have come, and all raise this."""


def _of_bytes(call: str, root: int, length: int) -> int:
    """What a rank calls if all dtypes are alike. `root`: its `src` or `dst`."""
    return _CALLS.index(call) << _CALL_BITS | root << _ROOT_BITS | length


def _differing(told: Sequence[int]) -> str:
    """What the ranks call, in words."""
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(told):
        ranks.setdefault(_in_words(call), []).append(rank)
    calls = (f"{numbered('rank', who, 4)} {'call' if len(who) > 1 else 'calls'} {words}" for words, who in ranks.items())
    return (
        f"the ranks do not match in this collective: {listed(calls, 4)}; call the same one on all ranks, with as many elements "
        "of the same dtype (rankwise run --check-collectives shows the lines)"
    )


def _name(call: int) -> str:
    name = _CALLS[call >> _CALL_BITS]
    return "all_reduce" if name in _OPS else name


def _in_words(call: int) -> str:
    name = _CALLS[call >> _CALL_BITS]
    dtype = str(_DTYPES[call >> _DTYPE_BITS & (1 << _CALL_BITS - _DTYPE_BITS) - 1]).removeprefix("torch.")
    values = f"{dtype}[{call & _ELEMENTS}]"
    if name in _OPS:
        return f"all_reduce({name}, {values})"
    root = f"{_ROOT_OF[name]}={call >> _ROOT_BITS & _MOST_RANKS - 1}" if name in _ROOT_OF else ""
    return f"broadcast({values}, {root})" if name == "broadcast" else f"{name}({root})"


def _combine(combine: Callable[..., Any], tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """In the order of ranks. `out` must be none of the tensors."""
    first, second, *rest = tensors
    combine(first, second, out=out)
    for each in rest:
        combine(out, each, out=out)


def _writes_to(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Tensors that were created in inference mode can be changed only there."""
    return torch.inference_mode() if tensor.is_inference() else _NOTHING_ELSE


_NOTHING_ELSE = contextlib.nullcontext()
