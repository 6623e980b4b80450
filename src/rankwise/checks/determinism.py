"""Forward passes without random numbers, and which layers draw some.

with without_dropout(): ...               # torch's own dropout does nothing
with Draws() as draws: model(x)           # which layers drew random numbers, and the state of the stream
with Autocasts() as autocasts: model(x)   # autocasts.dtype: "bfloat16"
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rankwise.dist import private_names
from rankwise.training.digest import digest

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@contextlib.contextmanager
def without_dropout(hold_batchnorm: bool = False) -> Iterator[None]:
    """torch's dropout functions return their input. Recurrent layers, and with `hold_batchnorm` batch norms, are in evaluation
    mode. A layer that draws in another way continues to draw, and Draws reports it."""
    kept: dict[str, Any] = {name: getattr(F, name) for name in (*_DROPOUTS, "scaled_dot_product_attention")}
    held: tuple[type[nn.Module], ...] = (nn.RNNBase, *(private_names.batch_norms() if hold_batchnorm else ()))
    training: list[nn.Module] = []

    def before(module: nn.Module, _inputs: Any) -> None:
        if isinstance(module, held) and module.training:
            training.append(module)
            module.training = False

    def after(module: nn.Module, _inputs: Any, _output: Any) -> None:
        if training and training[-1] is module:
            training.pop().training = True

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    for name in _DROPOUTS:
        setattr(F, name, _given)
    F.scaled_dot_product_attention = _attention_without(kept["scaled_dot_product_attention"])
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
        for name, function in kept.items():
            setattr(F, name, function)


def _given(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return input


def _attention_without(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def scaled_dot_product_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **more: Any
    ) -> torch.Tensor:
        return attention(query, key, value, attn_mask=attn_mask, dropout_p=0.0, is_causal=is_causal, **more)

    return scaled_dot_product_attention


def stream() -> str:
    """A digest of the state of torch's default generators: if digests are equal, the next numbers are too."""
    places = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        places.append(torch.cuda.get_rng_state())
    return "-".join(map(digest, places))


class Pass(NamedTuple):
    """One forward pass of a model in training."""

    at: str
    """The state of the streams at its start."""

    layers: tuple[str, ...]
    """The layers that drew random numbers: `2 (Dropout)`."""


class Draws:
    """While it is open, watches every forward pass in training of the outermost module. `on_begin`: called before it, with the
    module and its inputs (without those given by name, which torch's hook does not pass)."""

    def __init__(self, on_begin: Callable[[nn.Module, Any], None] = lambda _module, _inputs: None) -> None:
        self.passes: list[Pass] = []
        self._on_begin = on_begin
        self._open: list[tuple[nn.Module, str]] = []
        self._drew: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if not self._open:
            if not (module.training and torch.is_grad_enabled()) or isinstance(module, private_names.losses()):
                return
            self._on_begin(module, inputs)
            self._names = {id(m): name for name, m in module.named_modules()}
            self._drew = {}
        self._open.append((module, stream()))

    def _after(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if not self._open or self._open[-1][0] is not module:
            return
        _, at = self._open.pop()
        if stream() != at and not any(id(m) in self._drew for m in module.modules() if m is not module):
            name = self._names.get(id(module), "").removeprefix("module.")
            self._drew[id(module)] = f"{name} ({type(module).__name__})" if name else type(module).__name__
        if not self._open:
            self.passes.append(Pass(at, tuple(self._drew.values())))


class Autocasts:
    """While it is open, notes the type to which torch.autocast rounds in forward passes. `dtype`: the last one, or None."""

    def __init__(self) -> None:
        self.dtype: str | None = None
        self._hook: Any = None

    def __enter__(self) -> Self:
        self._hook = register_module_forward_pre_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _note(self, _module: nn.Module, _inputs: Any) -> None:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self.dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
