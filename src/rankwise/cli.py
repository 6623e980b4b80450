"""The command `rankwise`: verbs parse, call and print; no logic."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from rankwise import __version__
from rankwise.errors import ConfigError
from rankwise.launch.command_line import Group

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(
    cls=Group,
    context_settings=_HELP,
    epilog="\b\nBegin with: rankwise run train.py\nOptions of a command: rankwise COMMAND --help",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Run a training script on all devices of a machine, or of a cluster."""


class _Run(click.Command):
    """The command with the options of all schedulers besides its own. Notes whether the words to run came after a `--`: then
    they may be any command. Its help lists the options under headings."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*_of_schedulers(), *super().get_params(ctx)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from rankwise.launch import foreign_options
        from rankwise.run.config import option
        from rankwise.schedulers import options as of_schedulers

        words = list(args)
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        foreign_options.refuse(words, {"-h": False, **{name: not p.is_flag for p in options for name in p.opts}})
        rest = super().parse_args(ctx, args)
        before = words[: len(words) - len(ctx.params["argv"])]
        ctx.params["command"] = before[-1:] == ["--"]
        takers = [name for p in options if not p.is_flag for name in p.opts]
        if not ctx.params["argv"] and before[-2:-1] and before[-2] in takers:
            raise ConfigError(
                f"nothing to run: {before[-1]} is read as the value of {before[-2]}; give {before[-2]} a value, then the script"
            )
        known = of_schedulers()
        for p in options:
            typed = [name for name in p.opts if any(_begins(word, name) for word in before)]
            told = known[str(p.name)].typed if p.name in known else option(str(p.name))
            if typed and told not in typed:
                ctx.meta[told] = typed[0]
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """An error shows an option in the spelling that the user typed."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            text = str(error)
            for told, typed in ctx.meta.items():
                text = re.sub(rf"(?<![\w-]){re.escape(told)}(?![\w-])", typed, text)
            raise ConfigError(text) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Under each heading: first `_BEFORE`, then the options of schedulers, then the other options of this command."""
        from rankwise.schedulers import options as of_schedulers

        known = of_schedulers()
        rows: dict[str, list[click.Option]] = {heading: [] for heading in (_THIS_RUN, *_HEADINGS.values())}
        own = [p for p in super().get_params(ctx) if isinstance(p, click.Option)]
        rows[_THIS_RUN] = [p for p in own if p.name in _BEFORE]
        for p in [*_of_schedulers(), *(p for p in own if p.name not in _BEFORE)]:
            rows.setdefault(known.heading(str(p.name)) if p.name in known else _heading(p), []).append(p)
        for heading, options in rows.items():
            with formatter.section(heading):
                formatter.write_dl([row for row in (p.get_help_record(ctx) for p in options) if row is not None])


_THIS_RUN = "This run"
_HEADINGS = {
    "on": "Several nodes", "join_timeout_s": "Several nodes", "node_wait_s": "Several nodes", "dry_run": "A job in a queue",
    "wait": "A job in a queue",
}  # fmt: skip
"""The headings of this command's own options, except those of "This run"."""

_BEFORE = ("nproc",)
"""The options of "This run" that come before those of schedulers."""


def _heading(option: click.Parameter) -> str:
    return _HEADINGS.get(str(option.name), _THIS_RUN)


@functools.cache
def _of_schedulers() -> list[click.Option]:
    """`--on`, and the options that schedulers have declared. Cached: click compares the objects, so each call returns the same
    ones."""
    from rankwise import schedulers

    names = ", ".join((*schedulers.queues(), *schedulers.ALIASES))
    default = "ssh with -H, manual with --node-rank, the job that this shell is in, that of the site file, else local"
    on = f"What starts the ranks: {names}.  [default: {default}]"
    found = [click.Option(["--on"], metavar="SCHEDULER", help=on)]
    for name, option in schedulers.options().items():
        more: dict[str, Any] = {"is_flag": True} if option.kind is bool else {"metavar": option.metavar}
        if option.kind is int:
            more["type"] = int
        found.append(click.Option([*option.words, name], help=option.help, multiple=option.kind is list, **more))
    return found


def _begins(word: str, option: str) -> bool:
    return word == option or word.startswith(f"{option}=" if option.startswith("--") else option)


@main.command(cls=_Run, context_settings={**_HELP, "allow_interspersed_args": False}, options_metavar="[OPTIONS]")
@click.option(
    "--nproc",
    "--nproc-per-node",
    "--nproc_per_node",
    "nproc",
    metavar="N|auto",
    help="Ranks on each node; auto is one per GPU, or one per physical core if there is no GPU.  [default: auto]",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT.py is the name of a module, as with python -m.")
@click.option(
    "--master-port",
    "--master_port",
    "master_port",
    type=int,
    metavar="PORT",
    help="Port of rank 0, to which the other ranks connect.  [default: a free one, or 29500 with --node-rank]",
)
@click.option("--name", metavar="RUN", help="Name of the run.  [default: that of the script]")
@click.option("--run-dir", metavar="DIR", help="Folder of the run.  [default: ./runs/RUN]")
@click.option("--fresh", is_flag=True, help="Start from scratch; rename the folder of an older run of this name.")
@click.option(
    "--config", metavar="FILE.toml", help="A file with settings, named like these options. The command line has precedence."
)
@click.option("--max-restarts", type=int, metavar="K", help="How often to restart all ranks after a failure.  [default: 0]")
@click.option("--stop-after", metavar="TIME", help="Stop and save after this time: 90m, 12h. The same command resumes.")
@click.option(
    "--checkpoint-scope",
    metavar="main|node",
    help="Who writes a Trainer's checkpoints: rank 0, or one rank per node if the nodes share no disk.  [default: main]",
)
@click.option(
    "--sync",
    metavar="STRATEGY",
    help="How the ranks are synchronised, if the script does not set it: diloco:32, local-sgd:16, all-reduce:bf16.  "
    "[default: the exact gradient]",
)
@click.option(
    "--grace",
    "grace_s",
    type=float,
    metavar="SECONDS",
    help="After a request to stop, kill ranks that have not exited within this time.  [default: 120]",
)
@click.option(
    "--stall-warn",
    "stall_warn_s",
    type=float,
    metavar="SECONDS",
    help="After this time without progress, report which rank blocks the others; 0 is never.  [default: 120]",
)
@click.option(
    "--check-collectives",
    is_flag=True,
    help="Compare the collectives of all ranks (operation, shape, dtype, root, line); stop at the first difference.",
)
@click.option(
    "--allow-independent",
    is_flag=True,
    help="Start even if this is one of several tasks of srun, mpirun or torchrun: each task is then a separate run.",
)
@click.option(
    "--start-method",
    metavar="fork|spawn",
    help="Fork the ranks from one process that has imported torch, or start each as a new process.  [default: fork]",
)
@click.option("--tee", metavar="main|all", help="Show the output of rank 0, or of all ranks, line by line.  [default: main]")
@click.option(
    "--join-timeout",
    "join_timeout_s",
    type=float,
    metavar="SECONDS",
    help="How long to wait for the other nodes.  [default: 300]",
)
@click.option(
    "--node-wait",
    "node_wait_s",
    type=float,
    metavar="SECONDS",
    help="With --nodes MIN:MAX, how long to wait for missing nodes.  [default: 30]",
)
@click.option("--dry-run", is_flag=True, help="Print the job script, write it to the run directory, and start nothing.")
@click.option("--wait", is_flag=True, help="Wait for the queued job, show its output, and exit with its status.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.py [ITS ARGUMENTS]...")
def run(config: str | None, **options: Any) -> None:
    """Run SCRIPT.py on every device of this machine, or of several.

    After a --, SCRIPT.py may be any command. What follows SCRIPT.py belongs to it.
    The same command resumes a run that was stopped.
    """
    import os

    from rankwise import schedulers
    from rankwise.launch.launch import launch
    from rankwise.run.config import RunConfig, read_file, site_settings
    from rankwise.run.options import is_given

    known = schedulers.options()
    given = {name: value for name, value in options.items() if is_given(value) or name == "argv"}
    layers = [*site_settings(os.environ, known), read_file(config, known) if config is not None else {}, given]
    sys.exit(launch(RunConfig.of(known, *layers), os.environ))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.argument("run", metavar="[RUN]", required=False)
def status(run: str | None, as_json: bool) -> None:
    """Show whether a run waits, runs or has finished.

    RUN is a name under ./runs, or a folder. It is not needed if there is only one run.
    """
    from rankwise.launch.status import as_text, facts
    from rankwise.run.directory import find_run

    found = facts(find_run(run, "status"))
    click.echo(
        json.dumps(found, indent=2)
        if as_json
        else as_text(found, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    )


@main.command()
@click.option("--rank", type=int, metavar="N", help="Show the output of this rank.  [default: 0]")
@click.option("--all", "everyone", is_flag=True, help="Show the output of all ranks, and begin each line with its rank.")
@click.option("-f", "--follow", is_flag=True, help="Follow the output until the run has finished.")
@click.argument("run", metavar="[RUN]", required=False)
def logs(run: str | None, rank: int | None, everyone: bool, follow: bool) -> None:
    """Print what the ranks of a run have printed.

    RUN is a name under ./runs, or a folder. It is not needed if there is only one run.
    """
    from rankwise.launch.follow import show_logs
    from rankwise.run.directory import find_run

    if everyone and rank is not None:
        raise ConfigError(f"--all and --rank {rank}: give one of the two")
    if rank is not None and rank < 0:
        raise ConfigError(f"--rank {rank}: ranks count from 0")
    show_logs(find_run(run, "logs"), None if everyone else (rank or 0,), follow)


@main.command()
@click.argument("run", metavar="[RUN]", required=False)
def cancel(run: str | None) -> None:
    """Stop a run after its current step, and save.

    A job that still waits is removed from its queue.

    RUN is a name under ./runs, or a folder. It is not needed if there is only one run.
    """
    from rankwise.launch import status as of
    from rankwise.run.directory import find_run

    click.echo(of.cancel(find_run(run, "cancel")))


@main.command()
@click.argument("runs", metavar="[RUN]...", nargs=-1)
def report(runs: tuple[str, ...]) -> None:
    """Show what a run did: attempts, loss, where its time went.

    RUN is a name under ./runs, or a folder. It is not needed if there is only one run. With several RUNs, it compares how fast
    they were, to show whether more ranks helped.
    """
    from rankwise.report.terminal import print_report

    print_report(runs)


@main.command(context_settings={**_HELP, "allow_interspersed_args": False}, options_metavar="[OPTIONS]")
@click.option(
    "--ranks", default="1,2,4", show_default=True, metavar="N,N", help="Numbers of ranks, tested one after the other."
)
@click.option("--timeout", "timeout_s", type=float, default=600.0, metavar="SECONDS",
              help="How long each test may take.  [default: 600]")  # fmt: skip
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT.py [ITS ARGUMENTS]...")
def selftest(ranks: str, timeout_s: float, argv: tuple[str, ...]) -> None:
    """Test whether SCRIPT.py trains the same on any number of ranks.

    It takes a few steps on 1, 2 and 4 ranks, and checks gradients, samples, random numbers and steps; with a Trainer also
    resuming and evaluation. It writes nothing into a run directory. The exit status is 1 if a check has FAILED.
    """
    import os

    from rankwise.checks import script

    sys.exit(script.selftest(argv, script.ranks_of(ranks), timeout_s, os.environ))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON: rank, local_rank, world_size, ..., source, origin, error.")
@click.option("--allow-independent", is_flag=True,
              help="Accept that this is one of several processes that nothing connects: it trains alone.")  # fmt: skip
def explain(as_json: bool, allow_independent: bool) -> None:
    """Show which rank a process started here is, and why.

    Each number is printed with the variable that it comes from.
    Start it like the script: srun rankwise explain. Exit status 2 means that the script would not start.
    """
    import os

    from rankwise.dist import world
    from rankwise.report.explain import as_record, as_text

    told = world.explain(os.environ, allow_independent=allow_independent)
    click.echo(json.dumps(as_record(told), indent=2) if as_json else as_text(told))
    if told.error is not None:
        raise told.error


# --- checkpoint


@main.group(cls=Group)
def checkpoint() -> None:
    """List, verify, export or remove a run's checkpoints.

    RUN is a name under ./runs, a run directory, or a folder of checkpoints. It is not needed if only one run has checkpoints.
    """


_RUN = click.argument("run", metavar="[RUN]", required=False)
_WHICH = click.option("--checkpoint", "name", metavar="STEP", help="Which one: step-00000400, or 400.  [default: the newest]")
_TO = click.option("--to", required=True, metavar="FILE", type=click.Path(path_type=Path), help="FILE.pt or FILE.safetensors.")
_FORCE = click.option("--force", is_flag=True, help="Overwrite an existing file.")
_PART = click.option("--part", default="model", show_default=True, help="Which part of the checkpoint.")
_BY = click.option("--by", metavar="NAME", help="The metric that decides which is best.  [default: the run's keep_best]")
_LARGER = click.option(
    "--larger-is-better/--less-is-better", default=None, help="Which values of --by are best (not needed for a loss)."
)


@checkpoint.command("ls")
@_RUN
@click.option("--verify", is_flag=True, help="Read every byte instead of comparing the sizes only.")
def list_checkpoints(run: str | None, verify: bool) -> None:
    """List the checkpoints: step, time, size, ranks, metrics, state."""
    from rankwise.checkpoint import commands, folders

    click.echo(commands.list_all(folders.find(run), verify))


@checkpoint.command()
@_RUN
@_WHICH
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def show(run: str | None, name: str | None, as_json: bool) -> None:
    """Show the parts of a checkpoint, and each tensor."""
    from rankwise.checkpoint import commands, folders

    path = folders.pick(folders.find(run), name)
    click.echo(commands.show_as_json(path) if as_json else commands.show(path))


@checkpoint.command()
@_RUN
@click.option("--checkpoint", "name", metavar="STEP", help="Which one: step-00000400, or 400.  [default: all]")
def verify(run: str | None, name: str | None) -> None:
    """Read every byte, and report each corrupted file and tensor.

    The exit status is 1 if something is corrupted.
    """
    from rankwise.checkpoint import commands, folders

    folder = folders.find(run)
    paths = [folders.pick(folder, name)] if name is not None else folders.checkpoints_in(folder)
    damaged = False
    for path, damages in commands.verify(paths):
        damaged = damaged or bool(damages)
        click.echo("\n".join(damages or [f"{path.name} is intact"]))
    sys.exit(1 if damaged else 0)


@checkpoint.command("export")
@_RUN
@_TO
@_WHICH
@_PART
@_FORCE
def export_model(run: str | None, to: Path, name: str | None, part: str, force: bool) -> None:
    """Write only the model, for other programs.

    FILE gets the state dict: FILE.pt for torch.load(weights_only=True), FILE.safetensors for safetensors.
    """
    from rankwise.checkpoint import commands, folders

    commands.check_target(to, force)
    path = folders.pick(folders.find(run), name)
    commands.write_model(commands.read_model(path, part), to)
    click.echo(f"{part} of {path.name} written to {to}")


@checkpoint.command("average")
@_RUN
@_TO
@click.option("--last", type=int, metavar="N", help="Average the last N.")
@click.option("--best", type=int, metavar="N", help="Average the best N.")
@_BY
@_LARGER
@_PART
@_FORCE
def average_model(
    run: str | None, to: Path, last: int | None, best: int | None, by: str | None, larger_is_better: bool | None, part: str,
    force: bool,
) -> None:  # fmt: skip
    """Write the mean of the models of several checkpoints.

    The mean is computed in float64. Integers, such as counters, are those of the newest checkpoint.
    """
    from rankwise.checkpoint import commands, folders

    commands.check_target(to, force)
    paths = commands.choose_for_average(folders.find(run), last, best, by, larger_is_better)
    commands.write_model(commands.average(paths, part), to)
    click.echo(f"mean of {part} of {', '.join(path.name for path in paths)} written to {to}")


@checkpoint.command()
@_RUN
@click.option("--keep-last", type=int, metavar="N", help="Keep the last N intact checkpoints.  [default: 1]")
@click.option("--keep-best", type=int, metavar="N", help="Keep the best N, too.")
@_BY
@_LARGER
@click.option("--older-than", metavar="AGE", help="Remove only those that are older: 12h, 7d, 2w.")
@click.option("--keep", multiple=True, metavar="STEP", help="Keep this one, too. Repeatable.")
@click.option("--yes", is_flag=True, help="Remove them. Without it, only print what would be removed.")
def prune(run: str | None, yes: bool, **rules: Any) -> None:
    """Remove the checkpoints that no rule keeps.

    The newest intact one is never removed.
    """
    from rankwise.checkpoint import commands, folders

    gone = commands.find_prunable(folders.find(run), **rules)
    for path in gone:
        click.echo(commands.remove_one(path) if yes else f"would remove {path}")
    if not yes:
        click.echo("to remove them, type the same command with --yes" if gone else "nothing to remove")
