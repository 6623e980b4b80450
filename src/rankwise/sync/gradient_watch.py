"""In the first steps, notices what a script does to gradients outside of `backward` and `step`: it does so in each step.
What the loss of another model leaves in them is looked for in each step: it may begin late.

watch = GradientWatch()
watch.before_pass(reduction, is_first=True);  loss_sum.backward();  watch.after_pass(reduction.parameters, count)
watch.before_step()
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rankwise.dist import log, private_names
from rankwise.errors import StepError
from rankwise.sync.reduction import Count, Reduction

_STEPS = 16


class GradientWatch:
    """Local."""

    def __init__(self) -> None:
        self.is_on = True
        self._steps = 0
        self._told = False
        self._version_of = private_names.version_of() or (lambda _: 0)
        self._left: list[tuple[nn.Parameter, torch.Tensor, int]] = []
        """(parameter, its gradient, the version of that), as the last backward pass has left them."""

    def before_pass(self, reduction: Reduction, is_first: bool) -> None:
        """`is_first`: of this step. Raises StepError if the gradients are not what this step has computed so far."""
        if not is_first:
            self._compare()
        elif reduction.has_gradients():
            raise StepError(
                "the parameters have gradients of another backward pass, which would be added to this step (in a GAN, that of "
                "the other network's loss); call optimizer.zero_grad() before sync.backward"
            )

    def after_pass(self, parameters: Sequence[nn.Parameter], count: Count) -> None:
        """What a pass without samples has computed may be removed; it is added to the gradients of passes before."""
        has_samples = isinstance(count, torch.Tensor) or count != 0
        seen = parameters if has_samples else [p for p, _, _ in self._left]
        self._left = [(p, p.grad, self._version_of(p.grad)) for p in seen if p.grad is not None]

    def before_step(self) -> None:
        """Raises StepError if the gradients were removed."""
        self._compare()
        self.forget()
        self._steps += 1
        self.is_on = self._steps < _STEPS

    def forget(self) -> None:
        self._left = []

    def _compare(self) -> None:
        if any(p.grad is None for p, _, _ in self._left):
            raise StepError(
                "the gradients of this step were removed after sync.backward, so these samples would not count; remove "
                "optimizer.zero_grad() there, or in step_fn: sync.step clears the gradients (to leave a layer unchanged in a "
                "step, call requires_grad_(False) on it before the forward pass)"
            )
        if not self._told and any(p.grad is not was or self._version_of(was) != version for p, was, version in self._left):
            self._told = True
            log.warn(
                "the gradients were changed between sync.backward and sync.step. There they are sums over this rank's samples, "
                "not the mean over all samples, so clip_grad_norm_ has another effect on each rank: give clip_norm to attach, "
                "and make other changes in a hook of optimizer.register_step_pre_hook"
            )
