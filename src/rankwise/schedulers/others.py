"""Launchers and clouds that do not give enough to connect their processes. They are detected so that no process trains alone.

Each would have its own file if it gave rank, size, local rank and local size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from rankwise.schedulers.protocols import Launcher
from rankwise.schedulers.ranks import Ranks, not_joined, shown, single

_STARTERS = {
    "PMIX_RANK": "a launcher that speaks PMIx alone",
    "ALPS_APP_PE": "aprun",
    "MPT_LRANK": "mpiexec of HPE MPT",
    "PMI_ID": "mpirun_rsh",
}
"""By the variable that it sets for every process: a launcher."""

_HOSTS = {
    "SM_HOSTS": "a SageMaker job",
    "AWS_BATCH_JOB_NUM_NODES": "an AWS Batch job",
}
"""By the variable that names or counts the hosts of a job: the kind of job."""


_VARIABLES_OF_RANKS = "RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"


class OtherLaunchers(Launcher):
    name = "others"
    variables = (*_STARTERS, *_HOSTS)
    needs = "PMIX_RANK, PMI_ID, ... (one of several processes) or SM_HOSTS, ... (several hosts)"

    def detect(self, env: Mapping[str, str]) -> bool:
        """True in a process of such a launcher, and in a job with several hosts."""
        return self.one_of_several(env) or _job_of_several(env) is not None

    def one_of_several(self, env: Mapping[str, str]) -> bool:
        return any(name in env for name in _STARTERS)

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises NotJoinedError, because the rank is unknown, unless the job has only one host."""
        if self.one_of_several(env):
            variable = next(name for name in _STARTERS if name in env)
            raise not_joined(
                shown(env, [variable]),
                f"{_STARTERS[variable]} has started this process, and does not say how many there are",
                f"start the script with mpirun, or with rankwise run -H HOST1,HOST2, or set {_VARIABLES_OF_RANKS} for each",
            )
        if (found := _job_of_several(env)) is not None:
            variable, count = found
            raise not_joined(
                shown(env, [variable]),
                f"this is one process of {_HOSTS[variable]} of {count} hosts",
                "start the script on all of them with a launcher of the site (jsrun, mpirun), or with rankwise run -H "
                "HOST1,HOST2; for this host alone: rankwise run script.py",
            )
        return single("a job of one host")


def _job_of_several(env: Mapping[str, str]) -> tuple[str, int] | None:
    """(the variable, how many hosts) of a job with several hosts; None for one host, or if no variable is set."""
    counts = {
        "SM_HOSTS": _length(env.get("SM_HOSTS")),
        "AWS_BATCH_JOB_NUM_NODES": _number(env.get("AWS_BATCH_JOB_NUM_NODES")),
    }
    return next(((name, count) for name, count in counts.items() if count > 1), None)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 1


def _length(text: str | None) -> int:
    try:
        found = json.loads(text or "[]")
    except ValueError:
        return 1
    return len(found) if isinstance(found, list) else 1
