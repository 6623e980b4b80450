"""All gradients in one buffer, and one all-reduce when all are computed: for CPUs and for small models.

Gradients are views of the buffer (one buffer per dtype and device), with the layout in memory of their parameters, so that a
fused kernel reads both side by side. The order is the same in every step and after every resume, and so is the order of
additions. A rank without a sample needs no forward pass: its buffer is zero.

Small gradients are added to zeros in the buffer, as autograd does it. A large one on a CPU is copied to its place as soon as
autograd has created it, while it is in the processor's cache: this saves two passes over the memory of all gradients.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Sequence
from operator import attrgetter, is_, ne

import torch
from torch import nn

from rankwise.dist import comm, private_names
from rankwise.dist.device import is_dense
from rankwise.errors import StepError
from rankwise.host.text import size
from rankwise.sync.in_place import pays
from rankwise.sync.reduction import Count, LocalTail, RidingTail, Tail

_grad = attrgetter("grad")


class FlatReduction:
    """A Reduction without overlap: nothing is sent before `reduce`. `together`: with the other ranks. `apart`: the tail has a
    separate message."""

    begun = False

    def __init__(self, parameters: Sequence[nn.Parameter], together: bool, apart: bool = False) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        # The most precise dtype first: its buffer carries the tail.
        order = sorted(kinds.items(), key=lambda item: -torch.finfo(item[0][0]).bits)
        self.parameters = [p for _, group in order for p in group]
        self._together = together
        tail = len(self.parameters) + RidingTail.LENGTH if together else 0
        exact = not together or (torch.finfo(order[0][0][0]).bits >= 32 and not apart)
        self._buffers = [_Buffer(group, tail if exact and i == 0 else 0) for i, (_, group) in enumerate(order)]
        self._gradients = [buffer.gradient for buffer in self._buffers]
        first = self._buffers[0].flat
        # A separate message if no gradient is exact enough to carry a count (a bf16 or fp16 model).
        self._apart = None if exact else torch.zeros(tail, dtype=torch.float32, device=first.device)
        self._tail: Tail = LocalTail()
        if together:
            self._tail = RidingTail(first[-tail:] if self._apart is None else self._apart)
        self._count: Count = 0.0
        self.wait_s = 0.0
        self.sent_bytes = 0

    def expect(self, count: Count, last: bool) -> None:
        self._count = self._count + count
        for buffer in self._buffers:
            buffer.is_open = True

    def has_gradients(self) -> bool:
        return any(buffer.has_gradients() for buffer in self._buffers)

    def take_home(self) -> tuple[list[torch.Tensor | None], Count]:
        touched = [one for buffer in self._buffers for one in buffer.collect()]
        views = [view for buffer in self._buffers for view in buffer.views]
        found = [view.clone() if one else None for view, one in zip(views, touched, strict=True)]
        count, self._count = self._count, 0.0
        self.release()
        return found, count

    def drop(self) -> None:
        self._count = 0.0
        for buffer in self._buffers:
            buffer.drop()

    def put(self, gradients: Sequence[torch.Tensor | None], count: Count) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif gradient is not None:
                parameter.grad = gradient
        self._count = count

    def reduce(self, changed: bool = False) -> Tail:
        touched: list[bool] = []
        for buffer in self._buffers:
            touched += buffer.collect()
        self._tail.write(self._count, None if all(touched) else touched, changed)
        self._count = 0.0
        if self._together:
            began = time.perf_counter()
            self._exchange(changed)
            if self._apart is not None:
                comm.add(self._apart)
            self.sent_bytes += self._message_bytes
            self.wait_s += time.perf_counter() - began
        return self._tail

    @functools.cached_property
    def _message_bytes(self) -> int:
        """The bytes of the messages of one step."""
        return self._gradient_bytes() + (self._apart.nbytes if self._apart is not None else 0)

    def _gradient_bytes(self) -> int:
        return sum(buffer.flat.nbytes for buffer in self._buffers)

    def _exchange(self, changed: bool) -> None:
        """Collective. Sum the buffers over ranks."""
        for buffer in self._buffers:
            comm.add(buffer.flat)

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def applied(self, unused: Sequence[int]) -> None:
        """Nothing to do."""

    def release(self) -> None:
        for buffer in self._buffers:
            buffer.clear()
        if self._apart is not None:
            self._apart.zero_()

    def describe(self) -> str:
        return f"one all-reduce of {size(self._gradient_bytes())} per step"


class _Buffer:
    """The gradients of all parameters of one dtype and device, one after the other, and a tail."""

    def __init__(self, parameters: list[nn.Parameter], tail: int) -> None:
        self.parameters = parameters
        self._version_of = private_names.version_of()
        self._sizes = [p.numel() for p in parameters]
        first = parameters[0]
        self.is_open = False
        """Whether a backward pass of this step may run now."""

        takes = first.device.type == "cpu" and pays(parameters)
        for place, parameter in enumerate(parameters if takes else ()):
            hook = functools.partial(_take, weakref.ref(self), place)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._copies = takes or self._version_of is None
        self.flat = torch.zeros(sum(self._sizes) + tail, dtype=first.dtype, device=first.device)
        self.gradient = self.flat[: sum(self._sizes)]
        self._make_views()
        self.clear()

    def _make_views(self) -> None:
        pieces = torch.split(self.gradient, self._sizes)
        self.views = [_view(piece, p) for piece, p in zip(pieces, self.parameters, strict=True)]
        filled = [view for view in self.views if view.numel()] or self.views
        self._ends = filled[0], filled[-1]
        self._addresses = filled[0].data_ptr(), filled[-1].data_ptr()

    def collect(self) -> list[bool]:
        """Copy gradients that are not in the buffer into it (after `optimizer.zero_grad()` they are elsewhere). Returns which
        parameters have a gradient."""
        touched = list(map(ne, self._versions_now(), self._versions))
        moved = self._has_moved()
        if not moved and self._holds_all():
            return touched
        self._check_kind()
        before = self.views
        if moved:
            self._make_views()
        for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is not view:
                if parameter.grad is None:
                    view.zero_()
                else:
                    gradient = parameter.grad.detach()
                    view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                if parameter.grad is not before[i]:
                    touched[i] = parameter.grad is not None
                parameter.grad = view
        return touched

    def _has_moved(self) -> bool:
        """Whether the views are no longer in the buffer: `model.double()` or `model.cpu()` gives each other memory, which stays
        after `model.float()` or `model.cuda()`. Looks only at the first and the last, because each step calls it."""
        first, last = self._ends
        return (first.data_ptr(), last.data_ptr()) != self._addresses

    def _check_kind(self) -> None:
        now, then = self.parameters[0], self.flat
        if now.dtype != then.dtype or now.device != then.device:
            raise StepError(
                f"the parameters were {then.dtype} on {then.device} at the start of the training, and are {now.dtype} on "
                f"{now.device} now; convert or move the model before the strategy is attached, or a copy of it"
            )

    def has_gradients(self) -> bool:
        """Does not use the versions alone: `optimizer.zero_grad(set_to_none=False)` writes into the views, too. If they are the
        same, this waits for no device."""
        if self._holds_all() and not self._has_moved():
            return self._may_have_changed() and bool(self.gradient.any())
        return any(p.grad is not None and bool(p.grad.any()) for p in self.parameters)

    def drop(self) -> None:
        if self._may_have_changed() or not self._holds_all():
            self.clear()

    def _may_have_changed(self) -> bool:
        return self._version_of is None or self._versions_now() != self._versions

    def take(self, place: int, parameter: torch.Tensor) -> None:
        """Autograd has set the gradient of this parameter, or added to it."""
        gradient, view = parameter.grad, self.views[place]
        is_new = self.is_open and gradient is not view and parameter is self.parameters[place]
        # One of another kind, `collect` copies or refuses.
        if is_new and gradient is not None and not gradient.is_sparse and gradient.dtype == view.dtype:
            view.copy_(gradient.detach())
            parameter.grad = view

    def clear(self) -> None:
        self.is_open = False
        if self._copies:
            self.flat[len(self.gradient) :].zero_()
            for parameter in self.parameters:
                parameter.grad = None
        else:
            self.flat.zero_()
            if not self._holds_all():  # to compare is faster than to set them
                for parameter, view in zip(self.parameters, self.views, strict=True):
                    parameter.grad = view
        self._versions = self._versions_now()

    def _holds_all(self) -> bool:
        """Whether each gradient is its view of the buffer."""
        return all(map(is_, map(_grad, self.parameters), self.views))

    def _versions_now(self) -> list[int]:
        return list(map(self._version_of, self.views)) if self._version_of is not None else [0] * len(self.views)


def _take(buffer: weakref.ref[_Buffer], place: int, parameter: torch.Tensor) -> None:
    """A hook of a parameter, which may live longer than the buffer."""
    if (found := buffer()) is not None:
        found.take(place, parameter)


def _view(piece: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A view with the parameter's shape, and with its strides if autograd would use them for its gradient."""
    # Not a plain view: through `.data`, each has a separate version counter, which shows whether autograd has added to it.
    data = piece.data
    return data.as_strided(parameter.shape, parameter.stride()) if is_dense(parameter) else data.view_as(parameter)
