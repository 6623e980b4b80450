"""Grid Engine (Son of Grid Engine and similar ones): it gives hosts and slots, but no ranks.

    rankwise run --on sge --slots 8 --pe mpi -l h_rt=10:00:00 -l h_vmem=15G train.py

One agent per host, one rank per slot. The job's script becomes the head, which starts the other agents with `qrsh -inherit`.
"""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankwise.errors import ConfigError, WorldError
from rankwise.run.options import Option, from_one
from rankwise.run.plan import Host, Plan
from rankwise.schedulers.job import State, agent, call, enter, last_line, one_line, setup_lines, slug, stop_at_s
from rankwise.schedulers.options import ACCOUNT, QUEUE, REQUEUE, SETUP
from rankwise.schedulers.protocols import Hosts, Jobs, Launcher
from rankwise.schedulers.ranks import Ranks, not_joined, shown, single, whole_number

_CURE = "start the ranks with a launcher that reads the hosts of the job: rankwise run script.py, or mpirun python script.py"
_RESERVED = ("none", "all", "template")
_TIME = re.compile(r"(?:(?:(\d*):)?(\d*):)?(\d+)")
_MISSING = "type this on a submit host, after: source $SGE_ROOT/default/common/settings.sh"

_CURES = (
    (r'parallel environment ".*" does not exist', "to list them: qconf -spl"),
    (r'unknown queue ".*"', "to list them: qconf -sql"),
    (r'unknown resource ".*"', "to list them: qconf -sc"),
    (r'attribute ".*" is not a', "for example -l h_rt=10:00:00 -l h_vmem=15G -l gpu=1"),
    (
        r"no suitable queues",
        "no queue can ever run it: ask for fewer slots, less of a resource (-l), another --pe or -q; to see what there is: "
        "qhost -F",
    ),
    (r"range must be greater than zero|Numerical value invalid", "--slots must be at least 1"),
    (r"Error reading answer list", "a name has forbidden characters; use letters, digits, `.`, `_` and `-`"),
    (
        r"qmaster.*(?:send error|not running|no connection)|commlib error|unable to contact",
        "Grid Engine's server does not answer; is it up?",
    ),
)

_SHARED = "every host must see the run directory at this path; use --run-dir PATH with a folder that they share"

# Letters that qstat shows for a job that does not simply wait or run.
_LETTERS = (
    ("d", "being deleted"),
    ("h", "held"),
    ("s", "suspended"),
    ("S", "suspended"),
    ("T", "suspended"),
    ("t", "starting"),
)


class GridEngine(Launcher, Jobs, Hosts):
    name = "sge"
    variables = ("PE_HOSTFILE", "JOB_SCRIPT", "NHOSTS", "NSLOTS", "SGE_TASK_ID")
    needs = "PE_HOSTFILE or JOB_SCRIPT=QRSH"
    title = "Grid Engine"
    options = (
        Option("slots", "Slots of the parallel environment.", kind=int, metavar="N", check=from_one),
        Option("pe", "The parallel environment.", metavar="NAME"),
        Option(
            "resources",
            "A resource: h_rt=10:00:00. Repeatable.",
            kind=list,
            metavar="NAME=VALUE",
            spellings=("-l", "--resource"),
        ),
        QUEUE,
        ACCOUNT,
        REQUEUE,
        SETUP,
    )  # fmt: skip
    requeue_status = 99

    def detect(self, env: Mapping[str, str]) -> bool:
        """True in a job's script, on its first host, and in a process that `qrsh -inherit` started on the others."""
        return "PE_HOSTFILE" in env or env.get("JOB_SCRIPT") == "QRSH" or "SGE_TASK_ID" in env

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """A single process. Raises NotJoinedError in a job of several hosts: Grid Engine gives no process its rank."""
        if env.get("JOB_SCRIPT") == "QRSH":
            # Here NSLOTS and NHOSTS describe only this host: they may be 1 even in a large job.
            raise not_joined(
                shown(env, ("JOB_SCRIPT", "JOB_NAME", "JOB_ID")),
                "this is a task of qrsh, which does not give it a rank",
                f"pass RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT with qrsh -v, or {_CURE}",
            )
        hosts, slots = (whole_number(env, name) if name in env else None for name in ("NHOSTS", "NSLOTS"))
        if hosts is None and "PE_HOSTFILE" in env and slots != 1:
            raise not_joined(
                f"{shown(env, ('PE_HOSTFILE', 'NSLOTS'))} but no NHOSTS",
                "this is a parallel job, and its number of hosts is not known",
                _CURE,
            )
        if hosts is not None and hosts > 1:
            raise not_joined(
                shown(env, ("NHOSTS", "NSLOTS", "PE_HOSTFILE")),
                f"this is the job's script, on the first of its {hosts} hosts",
                _CURE,
            )
        notes = []
        if slots is not None and slots > 1:
            notes.append(f"NSLOTS={slots} slots on this host, but one process; to use them all: rankwise run script.py")
        if (task := self.array_task(env)) is not None:
            notes.append(f"task {task} of job array {env.get('JOB_ID', '?')}: each task trains on its own")
        return single("a Grid Engine job on one host", "; ".join(notes) or None)

    def array_task(self, env: Mapping[str, str]) -> str | None:
        return None if (task := env.get("SGE_TASK_ID", "undefined")) == "undefined" else task

    def attached(self, env: Mapping[str, str]) -> bool:
        """True inside a job: in its script, in a process that the script started, in a shell of qrsh or qlogin."""
        return "PE_HOSTFILE" in env or all(name in env for name in ("JOB_ID", "QUEUE", "SGE_ROOT"))

    def allocated(self, env: Mapping[str, str]) -> int | None:
        """The number of hosts of the job whose script this is; None outside of a job, and in a task on another host."""
        if not self.attached(env) or env.get("JOB_SCRIPT") == "QRSH":
            return None
        return max(1, whole_number(env, "NHOSTS")) if "NHOSTS" in env else 1

    def render(self, plan: Plan) -> str:
        """The job's script, for `cd RUN_DIR && qsub job.sh`. Raises ConfigError for values that such a script cannot
        contain."""
        lines = ["#!/bin/bash", *(f"#$ {option}" for option in _options(plan)), ""]
        lines += setup_lines(plan)
        lines.append(enter(one_line(plan.cwd, "the folder")))
        # exec: Grid Engine must signal the agent itself, and take its exit status as the job's (99: start again).
        lines.append(f"exec {agent(one_line(plan.run_dir, '--run-dir'))}")
        return "\n".join(lines) + "\n"

    def stop_after_s(self, job: Mapping[str, Any], grace_s: float) -> float:
        """In a parallel environment Grid Engine kills the tasks on other hosts at s_rt, and only then asks the job's script to
        stop (execd, sge_kill_petasks). So the head watches the time itself, before either limit."""
        if job.get("pe") is None:
            return 0.0
        asked = _asked([str(item) for item in job.get("resources", ())])
        return min(filter(None, (_lead_s(asked.get(name), grace_s) for name in ("h_rt", "s_rt"))), default=0.0)

    def submit(self, script: str, job: Mapping[str, Any]) -> str:
        """Returns the job's id. Raises ConfigError, in one line, if qsub refuses the job."""
        folder, name = Path(script).parent, Path(script).name
        # If the folder of its output is missing, a job fails without a message (Eqw).
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        done = call(["qsub", "-terse", name], _MISSING, cwd=str(folder))
        numbers = re.findall(r"^\d+", done.stdout, re.MULTILINE)
        if done.returncode == 0 and numbers:
            return str(numbers[-1])
        raise ConfigError(refused(f"{done.stdout}\n{done.stderr}"))

    def state(self, job: Mapping[str, Any]) -> State:
        """From qstat, then from qacct. `unknown` in the seconds between the two, and always if the site keeps no accounts.
        Never raises."""
        job_id: str = job["id"]
        try:
            listed = _listed(call(["qstat", "-xml"], _MISSING).stdout, job_id)
            if listed is None:
                return _accounted(call(["qacct", "-j", job_id], _MISSING).stdout)
            if "E" not in listed:
                phase = "waiting" if "q" in listed else "running"
                word = next((word for letter, word in _LETTERS if letter in listed), phase)
                return State(phase, f"{word} ({listed})")
            reason = _error_reason(call(["qstat", "-j", job_id], _MISSING).stdout)
        except ConfigError as error:
            return State("unknown", str(error))
        shared = f"; {_SHARED}" if re.search(r"No such file|Permission denied|can't (open|chdir|stat)", reason) else ""
        return State("stuck", f"{listed}: it will never start: {reason}{shared}; repair that, then type: qmod -cj {job_id}")

    def cancel(self, job: Mapping[str, Any]) -> None:
        """qdel; because of -notify the ranks are asked to stop first. Does nothing if the job has ended."""
        done = call(["qdel", job["id"]], _MISSING)
        if done.returncode != 0 and "does not exist" not in f"{done.stdout}{done.stderr}":
            raise ConfigError(f"qdel {job['id']}: {last_line(done)}")

    def hosts(self, plan: Plan, env: Mapping[str, str]) -> tuple[Host, ...]:
        """The hosts of PE_HOSTFILE with their slots, this one first: the head runs where the job's script runs.

        A host with slots of several queues has several lines there. Raises WorldError.
        """
        here = env.get("HOSTNAME") or socket.gethostname()
        if "PE_HOSTFILE" not in env:
            return (Host(here, 1),)
        path = env["PE_HOSTFILE"]
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise WorldError(
                f"PE_HOSTFILE={path}: {error.strerror}; it exists only on the first host of the job: start rankwise in the "
                "job's script"
            ) from None
        slots: dict[str, int] = {}
        for line in text.splitlines():
            match line.split():
                case [name, count, *_] if count.isdecimal():
                    slots[name] = slots.get(name, 0) + int(count)
                case [_, *_]:
                    raise WorldError(f"PE_HOSTFILE={path}: {line!r} is not `host slots queue processors`")
        own = [name for name in slots if name.lower() == here.lower()]
        own = own or [name for name in slots if _short(name) == _short(here)]  # one of the two names may have a domain
        if len(own) != 1:
            raise WorldError(
                f"PE_HOSTFILE={path} names {', '.join(slots) or 'no host'}, and this is {here}; start rankwise in the job's "
                "script"
            )
        names = sorted(slots, key=lambda name: name != own[0])  # the sort is stable: the others keep Grid Engine's order
        return tuple(Host(name, slots[name]) for name in names)

    def reach(self, host: str, command: list[str]) -> list[str]:
        """Words are quoted because a shell on the host parses the line again. A second shell is the parent of the command: if a
        task of qrsh is killed by a signal, Grid Engine kills the whole job, but this shell exits with status 128 + n instead.
        Signals that Grid Engine sends to the whole job (-notify, s_rt) must not end this shell: it waits until the command has
        stopped.
        """
        words = ["/bin/sh", "-c", f"trap : USR1 USR2 XCPU; {shlex.join(command)}; exit $?"]
        return ["qrsh", "-inherit", host, *(shlex.quote(word) for word in words)]

    def refusal(self, host: str, words: str) -> str | None:
        """Why qrsh could not start the command, in one line with what to type; None if the last error is not one of qrsh."""
        match = re.search(r"^error: executing task of job (?P<job>\S+) failed: (?P<why>.*\S)", words, re.MULTILINE)
        if match is None:
            return None
        return (
            f"qrsh cannot start a task on {host}: {match['why']}; the parallel environment must have control_slaves TRUE "
            f"(qconf -sp PE), and the execution daemon of the host must be up: qhost -h {host}"
        )


def _options(plan: Plan) -> list[str]:
    job = plan.job
    resources = [str(item) for item in job.get("resources", ())]
    slots, pe = job.get("slots"), job.get("pe")
    if slots is not None and str(slots) != "1" and pe is None:
        raise ConfigError(
            f"--slots {slots} without --pe: only a parallel environment gives slots; add --pe NAME (to list them: qconf -spl)"
        )
    if pe is not None and slots is None:
        raise ConfigError(
            f"--pe {pe} without --slots: the number of slots is missing; for example: --pe {shlex.quote(pe)} --slots 8"
        )
    name = slug(plan.name)
    if name.lower() in _RESERVED:
        name = f"run-{name}"
    options = [
        "-S /bin/bash",
        # A relative path for the output, next to this script: in an absolute one, `:` and `,` would have a special meaning.
        "-cwd",
        "-o logs/job-$JOB_ID.log",
        "-j y",
        f"-N {name}",
        "-v PATH",
        "-w e",  # without it, Grid Engine accepts a job that no queue can ever run, and the job waits forever
        f"-r {'y' if job.get('requeue') else 'n'}",
        "-notify",
    ]
    if pe is not None:
        options.append(f"-pe {_quoted(pe, '--pe')} {_quoted(str(slots), '--slots')}")
    options += [f"-l {_quoted(item, '-l')}" for item in resources]
    if pe is None and "s_rt" not in (asked := _asked(resources)) and (s_rt := _lead_s(asked.get("h_rt"), plan.grace_s)):
        options.append(f"-l s_rt={s_rt}")
    if (queue := job.get("queue")) is not None:
        options.append(f"-q {_quoted(queue, '-q')}")
    if (account := job.get("account")) is not None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", account):  # otherwise qsub only prints "Error reading answer list"
            raise ConfigError(f"-A {account!r}: an account of Grid Engine has only letters, digits, `.`, `_` and `-`")
        options.append(f"-A {account}")
    return options


def _quoted(value: str, what: str) -> str:
    """One word for a `#$` line, in which quotes keep blanks together, but a quote cannot be escaped."""
    one_line(value, what)
    if re.fullmatch(r"[A-Za-z0-9_.,:=@/*+%-]+", value):
        return value
    for quote in "\"'":
        if quote not in value and value:
            return f"{quote}{value}{quote}"
    raise ConfigError(f"{what} {value!r}: Grid Engine cannot take both kinds of quotes in one value; remove one kind")


def _asked(resources: Sequence[str]) -> dict[str, str]:
    return dict(item.partition("=")[::2] for entry in resources for item in entry.split(","))


def _lead_s(limit: str | None, grace_s: float) -> int:
    """How long after the start ranks are asked to stop: `grace_s` before `limit`; 0 if there is no limit."""
    match = _TIME.fullmatch(limit or "")
    if match is None:
        return 0
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return stop_at_s(3600 * hours + 60 * minutes + seconds, grace_s)


def refused(words: str) -> str:
    """The message of qsub that refuses a job, in one line with what to type."""
    said = " ".join(words.split()).removesuffix("Exiting.").strip()
    said = said.partition("Unable to run job: ")[2] or said or "it printed no reason"
    cure = next((f"; {cure}" for pattern, cure in _CURES if re.search(pattern, said)), "")
    return f"qsub refuses the job: {said.rstrip('. ')}{cure}"


def _listed(xml: str, job_id: str) -> str | None:
    """The state letters of a job in `qstat -xml`; for an array, those of a running task if there is one. None if the job is not
    listed."""
    from xml.etree import ElementTree  # not at the top: agents do not need it

    try:
        jobs = list(ElementTree.fromstring(xml).iter("job_list"))
    except ElementTree.ParseError:
        raise ConfigError(f"qstat -xml printed {xml[:80]!r} instead of XML; is Grid Engine's server up?") from None
    found = [job.findtext("state", "") for job in jobs if job.findtext("JB_job_number") == job_id]
    return min(found, key=lambda letters: ("q" in letters, "E" in letters), default=None)


def _error_reason(text: str) -> str:
    """Why a job is in the state Eqw, from the output of `qstat -j`."""
    match = re.search(r"^error reason[^:]*:\s*(?:[\d/]+ [\d:]+ \[[\d:]*\]: )?(?:error: )?(.*\S)", text, re.MULTILINE)
    return match[1] if match else "qstat -j does not say why"


def _accounted(text: str) -> State:
    """The last record of `qacct -j`: the job's own, after those of its tasks on other hosts."""
    record = dict(re.findall(r"^(\w+) +(.*\S)", text.rpartition("=====\n")[2], re.MULTILINE))
    if not record.get("exit_status", "").split(" ")[0].isdecimal():
        return State("unknown", "it is in no queue, and qacct has no record of it")
    failed, _, why = record.get("failed", "0").partition(":")
    return State("ended", "ended" if failed.strip() == "0" else why.strip(), int(record["exit_status"].split(" ")[0]))


def _short(name: str) -> str:
    return name.lower().partition(".")[0]
