"""LSF: jobs for its queue, and the variables of its processes. Written from its manuals (10.1); never run on a real cluster.

    rankwise run --on lsf --nodes 2 --gpus-per-node 4 --time 10:00:00 -q gpu train.py

The job's script becomes the head's agent on the first host; blaunch starts the others, which find the head through the run
directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rankwise.errors import ConfigError
from rankwise.run.options import Option
from rankwise.run.plan import Plan
from rankwise.schedulers.job import (
    SHELL,
    State,
    batch_script,
    call,
    cores,
    last_line,
    limited_s,
    one_line,
    plain,
    slug,
    stop_before,
)
from rankwise.schedulers.options import ACCOUNT, CPUS_PER_TASK, GPUS_PER_NODE, MEM, NODES, QUEUE, REQUEUE, SETUP, TIME
from rankwise.schedulers.protocols import Jobs, Launcher
from rankwise.schedulers.ranks import Ranks, not_joined, shown, single

_MISSING = "type the command on a machine that has LSF; --dry-run prints the job script on any machine"
_PREEMPTED = 75  # the head's exit status if the run was saved and shall be resumed
_PHASES = {
    "PEND": "waiting", "WAIT": "waiting", "PSUSP": "waiting", "RUN": "running", "USUSP": "running", "SSUSP": "running",
    "PROV": "running", "UNKWN": "running", "ZOMBI": "running", "DONE": "ended", "EXIT": "ended",
}  # fmt: skip


class Lsf(Launcher, Jobs):
    name = "lsf"
    title = "LSF"
    variables = ("LSB_JOBID", "LSB_MCPU_HOSTS", "LSF_PM_TASKID", "LSB_JOBINDEX")
    needs = "LSB_JOBID"
    options = (
        NODES, GPUS_PER_NODE, CPUS_PER_TASK, MEM, TIME, QUEUE, ACCOUNT, SETUP, REQUEUE,
        Option(
            "bsub_args", "Another option of bsub, such as -x. Repeatable.", kind=list, metavar="ARG", spellings=("--bsub-arg",)
        ),
    )  # fmt: skip

    # --- who am I

    def detect(self, env: Mapping[str, str]) -> bool:
        return "LSB_JOBID" in env

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises NotJoinedError: LSF gives no process a rank."""
        if self.one_of_several(env):
            raise not_joined(
                shown(env, ("LSF_PM_TASKID",)),
                "blaunch has started this process, and LSF does not say how many there are",
                "start the script with rankwise run script.py in the job's own script, or with rankwise run -H HOST1,HOST2",
            )
        if (count := self.allocated(env) or 1) > 1:
            raise not_joined(
                shown(env, ("LSB_MCPU_HOSTS",)),
                f"this is one process of an LSF job of {count} hosts",
                "on all of them: jsrun python script.py (if there is jsrun), rankwise run script.py, or rankwise run -H "
                "HOST1,HOST2",
            )
        task = self.array_task(env)
        note = f"task {task} of a job array: each task trains on its own" if task is not None else None
        return single("an LSF job on one host", note)

    def one_of_several(self, env: Mapping[str, str]) -> bool:
        return "LSF_PM_TASKID" in env

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        return f"lsf-{env['LSB_JOBID']}.{env.get('LSB_JOBINDEX', '0')}" if "LSB_JOBID" in env else None

    def array_task(self, env: Mapping[str, str]) -> str | None:
        """A job that is not an array has the index 0."""
        return env["LSB_JOBINDEX"] if env.get("LSB_JOBINDEX", "0") != "0" else None

    # --- a queue of jobs

    def allocated(self, env: Mapping[str, str]) -> int | None:
        """LSB_MCPU_HOSTS is `host1 16 host2 16`."""
        if not self.detect(env) or self.one_of_several(env):
            return None
        return max(1, len(env.get("LSB_MCPU_HOSTS", "").split()) // 2)

    def attached(self, env: Mapping[str, str]) -> bool:
        return self.allocated(env) is not None

    def render(self, plan: Plan) -> str:
        """Raises ConfigError for options that LSF cannot express."""
        job, each = plan.job, cores(plan) or 1
        kind, _, gpus = str(job.get("gpus_per_node", "")).rpartition(":")
        model = f":gmodel={kind}" if kind else ""
        slots = [str(count * each) for count in sorted({plan.min_nodes, plan.nodes})]
        needs = [f"span[ptile={each}]", *([f"rusage[mem={plain('--mem', job['mem'], 'LSF')}]"] if "mem" in job else [])]
        asked = [
            f"-J {slug(plan.name)}",
            f"-n {','.join(slots)}",
            f'-R "{" ".join(needs)}"',
            *([f'-gpu "num={gpus}{model}"'] if gpus else []),
            *([f"-W {_minutes(limited_s(job['time'], 'LSF'))}"] if "time" in job else []),
            *([f"-q {plain('-q', job['queue'], 'LSF')}"] if "queue" in job else []),
            *([f"-P {plain('-A', job['account'], 'LSF')}"] if "account" in job else []),
            *([f'-Q "{_PREEMPTED}"'] if job.get("requeue") else []),
            *(one_line(argument, "--bsub-arg") for argument in job.get("bsub_args", ())),
            "-o /dev/null",  # LSF would deliver the output at the end; this script writes it at once
        ]
        others = "$(echo $LSB_MCPU_HOSTS | awk '{ for (i = 3; i <= NF; i += 2) print $i }')"
        return batch_script(plan, [f"#BSUB {option}" for option in asked], '"$LSB_JOBID"', others, 'blaunch "$host"')

    def stop_after_s(self, job: Mapping[str, Any], grace_s: float) -> float:
        """LSF ends a job at its limit with only a few seconds' notice, so the head watches the time itself."""
        return stop_before(job.get("time"), grace_s)

    def submit(self, script: str, job: Mapping[str, Any]) -> str:
        done = call([*SHELL, "-c", 'exec bsub < "$1"', "bash", script], _MISSING)  # bsub sends its environment
        if done.returncode == 0 and (match := re.search(r"^Job <(\d+)>", done.stdout, re.MULTILINE)):
            return match[1]
        raise ConfigError(f"LSF refuses the job: {last_line(done)}" + (f"; {_MISSING}" if done.returncode == 127 else ""))

    def state(self, job: Mapping[str, Any]) -> State:
        """From bjobs, which shows a job for an hour after its end (CLEAN_PERIOD)."""
        try:
            done = call(["bjobs", "-noheader", "-o", "stat exit_code pend_reason delimiter='|'", job["id"]], _MISSING)
        except ConfigError as error:
            return State("unknown", str(error))
        match = re.search(r"^(\w+)\|(-|\d+)\|(.*)$", done.stdout, re.MULTILINE)
        if match is None:
            return State("unknown", last_line(done))
        word, code, why = match.groups()
        phase = _PHASES.get(word, "unknown")
        reason = f"{word}: {why}" if why not in ("", "-") else word
        status = None if phase != "ended" else int(code) if code != "-" else 0 if word == "DONE" else 1
        return State(phase, reason, status)

    def cancel(self, job: Mapping[str, Any]) -> None:
        """Sends SIGTERM to the head; plain bkill would kill it after a few seconds."""
        done = call(["bkill", "-s", "TERM", job["id"]], _MISSING)
        if done.returncode != 0:
            raise ConfigError(f"LSF did not cancel job {job['id']}: {last_line(done)}")


def _minutes(seconds: int) -> str:
    minutes = -(-seconds // 60)
    return f"{minutes // 60}:{minutes % 60:02d}"
