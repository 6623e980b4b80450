"""jsrun, of IBM's Job Step Manager: the variables that it sets for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankwise.schedulers.counting import Counting


class Jsrun(Counting):
    name = "jsrun"
    called = "jsrun"
    variables = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
    needs = "JSM_NAMESPACE_RANK"

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        """The LSF job and its step: PMIx names each step of a job."""
        if "LSB_JOBID" not in env or "PMIX_NAMESPACE" not in env:
            return None
        return f"jsrun-{env['LSB_JOBID']}.{env.get('LSB_JOBINDEX', '0')}-{env['PMIX_NAMESPACE']}"
