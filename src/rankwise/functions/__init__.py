"""Functions instead of scripts: `run_function` with rankwise's launcher, `on_submitit` with Submitit's executors."""

from typing import TYPE_CHECKING

from rankwise.host.lazy import lazy

if TYPE_CHECKING:
    from rankwise.functions.run_function import FunctionRun as FunctionRun
    from rankwise.functions.submitit_executor import on_submitit as on_submitit

_HOME = {"FunctionRun": "rankwise.functions.run_function", "on_submitit": "rankwise.functions.submitit_executor"}

__all__ = sorted(_HOME)

__getattr__ = lazy(__name__, _HOME)
