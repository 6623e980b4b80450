"""Actions, which run after each optimizer step: functions of the TrainState, in the Trainer's `actions`.

An action may also have these, all optional:

    attach(trainer)      called once, when the Trainer is created; must not communicate. The trainer has `state`, `loader`,
    `sync`,
                         `meters`, `breakdown`, `progress`, `run`, `device`, `forward` and `precision`
    begin(state)         collective, in `fit`, after the checkpoint is loaded
    state_dict(), load_state_dict(state) and an attribute `name`: saved and resumed under that name
    close()              when `fit` returns or raises

Names are resolved on first use: the launcher imports no torch.
"""

from typing import TYPE_CHECKING

from rankwise.host.lazy import lazy

if TYPE_CHECKING:
    from rankwise.actions.early_stopping import EarlyStopping as EarlyStopping
    from rankwise.actions.ema import EMA as EMA
    from rankwise.actions.log import Log as Log
    from rankwise.actions.periodic import every as every
    from rankwise.actions.plateau import Plateau as Plateau
    from rankwise.sync.divergence import CheckReplicas as CheckReplicas
    from rankwise.telemetry.writers import JsonLines as JsonLines
    from rankwise.telemetry.writers import TensorBoard as TensorBoard
    from rankwise.training.optimizer import scale_lr as scale_lr

_HOME = {
    "CheckReplicas": "rankwise.sync.divergence", "EarlyStopping": "rankwise.actions.early_stopping",
    "EMA": "rankwise.actions.ema", "JsonLines": "rankwise.telemetry.writers", "Log": "rankwise.actions.log",
    "Plateau": "rankwise.actions.plateau", "TensorBoard": "rankwise.telemetry.writers", "every": "rankwise.actions.periodic",
    "scale_lr": "rankwise.training.optimizer",
}  # fmt: skip

__all__ = sorted(_HOME)

__getattr__ = lazy(__name__, _HOME)
