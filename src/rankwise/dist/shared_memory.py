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
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from rankwise.errors import CollectiveError
from rankwise.host import network
from rankwise.host.text import listed, numbered

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
_CALL_BITS, _DTYPE_BITS = 56, 48
_ELEMENTS = (1 << _DTYPE_BITS) - 1
"""What a rank calls is one integer: which call, which dtype, and the number of elements."""

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
            with contextlib.suppress(OSError, ValueError):
                file, rounds = _meet(rank, [one[len(here) + 1 :] for one in told], door, file, passing, kept)
                made = SharedMemory(rank, ranks, file, rounds, timeout_s)
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
    if not hasattr(os, "memfd_create"):
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
    for number in range((ranks - 1).bit_length()):
        step = 1 << number
        after, before = (rank + step) % ranks, (rank - step) % ranks
        to = kept.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        to.settimeout(_CONNECT_S)
        to.connect(_address(names[after]))
        has_it = rank < step and rank + step < ranks  # in each round, the ranks with the file send it to as many others
        socket.send_fds(to, [_HELLO.pack(rank, number)], [file] if has_it else [])
        while (before, number) not in came:
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
    """The bytes of the numbers: what each rank calls, in both slots, and how many times it has come."""
    return -(-3 * 8 * ranks // mmap.PAGESIZE) * mmap.PAGESIZE


# --- collectives


class SharedMemory:
    """The memory and the connections of one rank. Each public method is a collective. It raises CollectiveError if another rank
    has exited, does not come in time, or calls something else; only in the last case the next collective may succeed."""

    def __init__(self, rank: int, ranks: int, file: int, rounds: Sequence[Round], timeout_s: float) -> None:
        self._rank, self._ranks, self._rounds, self._timeout_s = rank, ranks, rounds, timeout_s
        self._slot_bytes, size = _layout(ranks)
        self._memory, self._first = mmap.mmap(file, size), _numbers_bytes(ranks)
        numbers = memoryview(self._memory)[: 3 * 8 * ranks].cast("q")
        self._calls, self._came = (numbers[:ranks], numbers[ranks : 2 * ranks]), numbers[2 * ranks :]
        self._turn = 0
        self._views: dict[tuple[torch.dtype, int], list[list[torch.Tensor]]] = {}
        self._lock = threading.Lock()
        self._is_open = True
        limit_s = min(timeout_s, 1e9)
        limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
        for each in rounds:
            each.to.settimeout(None)
            each.source.settimeout(None)  # with a timeout of Python, each recv would poll first
            each.source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        os.register_at_fork(after_in_child=functools.partial(_forked, weakref.ref(self)))

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Reduce a contiguous tensor in place; `op`: sum, min or max. All ranks get the same bits: those of adding one rank
        after the other, from rank 0."""
        flat = tensor.view(-1)
        call, combine, most = _packed(op, flat), _OPS[op], self._slot_bytes // flat.element_size()
        with self, _writes_to(flat):
            for piece in torch.split(flat, most) if len(flat) > most else (flat,):
                slots = self._slots(piece)
                slots[self._rank].copy_(piece)
                self._enter(call)
                if self._ranks == 2 or piece.nbytes <= _WHOLE:
                    _combine(combine, slots, piece)
                else:
                    self._combine_in_parts(combine, slots, piece, call)

    def _combine_in_parts(
        self, combine: Callable[..., Any], slots: Sequence[torch.Tensor], piece: torch.Tensor, call: int
    ) -> None:
        """Each rank computes one part, and copies it to its slot: the others no longer read that part there."""
        length = -(-len(piece) // self._ranks)
        parts = [slice(rank * length, (rank + 1) * length) for rank in range(self._ranks)]
        mine = parts[self._rank]
        _combine(combine, [slot[mine] for slot in slots], piece[mine])
        slots[self._rank][mine].copy_(piece[mine])
        self._wait(call)
        for part, slot in zip(parts, slots, strict=True):
            if part is not mine:
                piece[part].copy_(slot[part])

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Set a contiguous tensor to that of rank `src`."""
        flat = tensor.view(-1)
        call, most = _packed("broadcast", flat), self._slot_bytes // flat.element_size()
        with self, _writes_to(flat):
            for piece in torch.split(flat, most):
                slots = self._slots(piece)
                if self._rank == src:
                    slots[src].copy_(piece)
                self._enter(call)
                if self._rank != src:
                    piece.copy_(slots[src])

    def all_gather_object(self, data: bytes, patient: bool = False) -> list[bytes]:
        """Return the data of all ranks. `patient`: wait for a rank as long as it is alive."""
        return self._exchange("all_gather_object", data, range(self._ranks), patient)

    def gather_object(self, data: bytes, dst: int) -> list[bytes]:
        """Return the data of all ranks on rank `dst`; an empty list on the others."""
        return self._exchange("gather_object", data, range(self._ranks) if self._rank == dst else ())

    def broadcast_object(self, data: bytes, src: int, patient: bool = False) -> bytes:
        """Return the data of rank `src`; that of the other ranks is not used. `patient`: wait as long as it is alive."""
        return self._exchange("broadcast_object", data if self._rank == src else b"", [src], patient)[0]

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        with self:
            self._enter(_CALLS.index("barrier") << _CALL_BITS)

    # --- inside a collective

    def _exchange(self, call: str, data: bytes, wanted: Sequence[int], patient: bool = False) -> list[bytes]:
        """The data of the wanted ranks, which need not be the same on all ranks."""
        found = [bytearray() for _ in wanted]
        start, longest = 0, 1
        with self:
            while start < longest:
                slots = [self._first + (self._turn * self._ranks + rank) * self._slot_bytes for rank in range(self._ranks)]
                piece = data[start : start + self._slot_bytes]
                self._memory[slots[self._rank] : slots[self._rank] + len(piece)] = piece
                lengths = self._enter(_CALLS.index(call) << _CALL_BITS | len(data), are_lengths=True, patient=patient)
                for rank, whole in zip(wanted, found, strict=True):
                    whole += self._memory[slots[rank] : slots[rank] + max(0, min(lengths[rank] - start, self._slot_bytes))]
                start, longest = start + self._slot_bytes, max(lengths)
        return list(map(bytes, found))

    def __enter__(self) -> None:
        """Begin a collective."""
        global begun
        self._lock.acquire()
        begun += 1
        if not self._is_open:
            self._lock.release()
            raise CollectiveError("an exception has ended an earlier collective of this rank, so it can call no other")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        """After an exception, the other ranks must not wait for this one."""
        if kind is not None and not isinstance(error, MismatchError):
            self.close()
        self._lock.release()

    def close(self) -> None:
        """Not a collective. Others that wait for this rank raise CollectiveError."""
        self._is_open = False
        for each in self._rounds:
            each.to.close()
            each.source.close()

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
        calls[self._rank] = call
        self._wait(call, patient)
        self._turn = 1 - self._turn
        told = calls.tolist()
        if told.count(call) < self._ranks and (not are_lengths or len({one >> _CALL_BITS for one in told}) > 1):
            raise MismatchError(_differing(told))
        return [one & _ELEMENTS for one in told] if are_lengths else []

    def _wait(self, call: int, patient: bool = False) -> None:
        """Return when all ranks have called this."""
        self._came[self._rank] += 1
        for to, source, who in self._rounds:
            has_come = b""
            with contextlib.suppress(ConnectionError):
                to.send(b".", socket.MSG_NOSIGNAL)
                has_come = self._received(source, call, patient)
            if not has_come:
                raise CollectiveError(
                    f"rank {who} has exited, or an exception has ended its collective, while rank {self._rank} waited for it "
                    f"in {_name(call)} (Connection closed by peer)"
                )

    def _received(self, source: socket.socket, call: int, patient: bool) -> bytes:
        while True:
            try:
                return source.recv(1)
            except BlockingIOError:
                if not patient:
                    raise CollectiveError(self._too_late(call)) from None

    def _too_late(self, call: int) -> str:
        here = self._came[self._rank]
        late = [rank for rank, number in enumerate(self._came) if number < here]
        who = numbered("rank", late, 8) if late else "the other ranks"
        return (
            f"Timed out waiting {self._timeout_s:g} s for {who} in {_name(call)}; if the work between two collectives takes "
            "longer, give rankwise.init(timeout_s=...)"
        )


def _forked(memory: weakref.ref[SharedMemory]) -> None:
    """In a process that a rank has forked (a loader worker, for example). It may live longer than the rank, and nobody must
    wait for it."""
    if (inherited := memory()) is not None:
        inherited.close()


class MismatchError(CollectiveError):
    """All ranks have come, and all raise this."""


def _packed(call: str, flat: torch.Tensor) -> int:
    return _CALLS.index(call) << _CALL_BITS | _CODES[flat.dtype] << _DTYPE_BITS | len(flat)


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
    dtype = str(_DTYPES[call >> _DTYPE_BITS & 0xFF]).removeprefix("torch.")
    if name in _OPS:
        return f"all_reduce({name}, {dtype}[{call & _ELEMENTS}])"
    return f"broadcast({dtype}[{call & _ELEMENTS}])" if name == "broadcast" else f"{name}()"


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
