"""jsrun, of IBM's Job Step Manager: what it sets for each rank that it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankwise.schedulers.protocols import Launcher
from rankwise.schedulers.ranks import Ranks, Tasks, counted, tasks_of


class Jsrun(Launcher):
    name = "jsrun"
    variables = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
    needs = "JSM_NAMESPACE_RANK"

    def detect(self, env: Mapping[str, str]) -> bool:
        """True if it names a rank or a size; a part of its variables is an error that `ranks` explains."""
        return "JSM_NAMESPACE_RANK" in env or "JSM_NAMESPACE_SIZE" in env

    def tasks(self, env: Mapping[str, str]) -> Tasks | None:
        return tasks_of(env, "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises WorldError for a part of the variables, a value that is no number, a rank that is not below its size."""
        return counted(env, self.variables, "jsrun")

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """The job of LSF, and which of its steps: PMIx names each step of a job."""
        if "LSB_JOBID" not in env or "PMIX_NAMESPACE" not in env:
            return None
        return f"jsrun-{env['LSB_JOBID']}.{env.get('LSB_JOBINDEX', '0')}-{env['PMIX_NAMESPACE']}"
