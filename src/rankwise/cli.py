"""The command `rankwise`: verbs parse, call and print; no logic."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from rankwise.errors import RankwiseError

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Group(click.Group):
    """Prints our own errors in one line; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RankwiseError as error:
            click.echo(f"rankwise: {error}", err=True)
            sys.exit(error.exit_status)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0].endswith(".py"):
            ctx.fail(f"{args[0]} is no command; type: rankwise run {args[0]}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Group, context_settings=_HELP)
@click.version_option(package_name="rankwise", message="%(prog)s %(version)s")
def main() -> None:
    """Run a training script, written for one device, on all devices."""


class _Run(click.Command):
    """Notes whether the words to run came after a `--`: then they are any command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        rest = super().parse_args(ctx, args)
        ctx.params["command"] = words[len(words) - len(ctx.params["argv"]) - 1 :][:1] == ["--"]
        return rest


@main.command(cls=_Run, context_settings={**_HELP, "allow_interspersed_args": False}, options_metavar="[OPTIONS]")
@click.option(
    "--nproc",
    "--nproc-per-node",
    "--nproc_per_node",
    "nproc",
    metavar="N|auto",
    help="Ranks on this machine; auto is one a GPU, or one a physical core where there is no GPU.  [default: auto]",
)
@click.option("--gpus", metavar="0,2", help="The GPUs to use, by number; all by default.")
@click.option("-m", "module", is_flag=True, help="SCRIPT.py is the name of a module, as for python -m.")
@click.option("--master-port", type=int, metavar="PORT", help="Port of the ranks' rendezvous.  [default: a free one]")
@click.option("--name", metavar="RUN", help="Name of the run; the script's stem by default.")
@click.option("--run-dir", metavar="DIR", help="Where the run writes; ./runs/RUN by default.")
@click.option("--fresh", is_flag=True, help="Move an older run aside and start anew, instead of going on with it.")
@click.option("--config", metavar="FILE.toml", help="Settings of a run, by the names of these options; options win.")
@click.option("--max-restarts", type=int, metavar="K", help="How often to start all ranks again after a failure.  [default: 0]")
@click.option(
    "--grace",
    "grace_s",
    type=float,
    metavar="SECONDS",
    help="How long ranks may take to stop when asked, before they are killed.  [default: 120]",
)
@click.option(
    "--stall-warn",
    "stall_warn_s",
    type=float,
    metavar="SECONDS",
    help="After how long without progress to tell which rank keeps the others waiting; 0 is never.  [default: 120]",
)
@click.option(
    "--check-collectives",
    is_flag=True,
    help="Compare what the ranks ask of each other (operation, shape, dtype, root, line); end at the first difference.",
)
@click.option(
    "--allow-independent",
    is_flag=True,
    help="Start even as one of several tasks of srun, mpirun or torchrun: each is then a run of its own.",
)
@click.option(
    "--start-method",
    metavar="fork|spawn",
    help="Fork the ranks from one process that has imported torch, or start each by itself.  [default: fork]",
)
@click.option("--tee", metavar="main|all", help="Show the output of rank 0, or of all ranks, line by line.  [default: main]")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.py [ITS ARGUMENTS]...")
def run(config: str | None, **options: Any) -> None:
    """Run SCRIPT.py on every device of this machine.

    After a -- it may be any command. What follows SCRIPT.py is its own.
    A run that was stopped goes on when the same command is typed again.
    """
    import os

    from rankwise.config import RunConfig, read_file, site_settings
    from rankwise.launch.launch import launch

    given = {name: value for name, value in options.items() if value is not None and value is not False}
    layers = [*site_settings(os.environ), read_file(config) if config else {}, given]
    sys.exit(launch(RunConfig.of(*layers), os.environ))


@main.command()
@click.argument("run", metavar="[RUN]", required=False)
def report(run: str | None) -> None:
    """Tell what a run did: its lives, its loss, where its time went.

    RUN is a name under ./runs, or a folder; it may be left out where there is one run alone.
    """
    from rankwise.report.terminal import print_report

    print_report(run)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON: rank, local_rank, world_size, ..., source, origin, error.")
@click.option("--allow-independent", is_flag=True,
              help="One of several processes that nothing has joined is then a training of its own.")  # fmt: skip
def explain(as_json: bool, allow_independent: bool) -> None:
    """Tell which rank a process started here is, and why.

    Each number is told with the variable that it comes from.
    Put it where the script would stand: srun rankwise explain. Exit status 2 means that the script would not start.
    """
    import os

    from rankwise import world
    from rankwise.report.explain import as_record, as_text

    told = world.explain(os.environ, allow_independent=allow_independent)
    click.echo(json.dumps(as_record(told), indent=2) if as_json else as_text(told))
    if told.error is not None:
        raise told.error


# --- checkpoint


@main.group()
def checkpoint() -> None:
    """List, verify, export or remove a run's checkpoints.

    RUN is a name under ./runs, a run directory, or a folder of checkpoints; it may be left out where one run alone has some.
    """


_RUN = click.argument("run", metavar="[RUN]", required=False)
_WHICH = click.option("--checkpoint", "name", metavar="STEP", help="Which one: step-00000400, or 400.  [default: the newest]")
_TO = click.option("--to", required=True, metavar="FILE", type=click.Path(path_type=Path), help="FILE.pt or FILE.safetensors.")
_FORCE = click.option("--force", is_flag=True, help="Write over a file that is there.")
_PART = click.option("--part", default="model", show_default=True, help="Which of the things that were saved together.")
_BY = click.option("--by", metavar="NAME", help="The figure that says which is best.  [default: the run's keep_best]")
_LARGER = click.option("--larger-is-better/--less-is-better", default=None, help="With --by; only a loss need not say.")


@checkpoint.command("ls")
@_RUN
@click.option("--verify", is_flag=True, help="Read every byte; else sizes alone are compared.")
def list_checkpoints(run: str | None, verify: bool) -> None:
    """A line a checkpoint: step, time, size, ranks, figures, state."""
    from rankwise.checkpoint import folders, listing

    click.echo(listing.listed(folders.find(run), verify))


@checkpoint.command()
@_RUN
@_WHICH
@click.option("--json", "as_json", is_flag=True, help="The manifest as JSON.")
def show(run: str | None, name: str | None, as_json: bool) -> None:
    """What is in one: its parts, each tensor's type, shape and size."""
    from rankwise.checkpoint import folders, listing

    path = folders.pick(folders.find(run), name)
    click.echo(listing.shown_as_json(path) if as_json else listing.shown(path))


@checkpoint.command()
@_RUN
@click.option("--checkpoint", "name", metavar="STEP", help="Which one: step-00000400, or 400.  [default: all]")
def verify(run: str | None, name: str | None) -> None:
    """Read every byte, and name each damaged file and tensor.

    Exit status 1 if there is one.
    """
    from rankwise.checkpoint import folders, listing

    folder = folders.find(run)
    paths = [folders.pick(folder, name)] if name is not None else folders.checkpoints_in(folder)
    damaged = False
    for path, damages in listing.verified(paths):
        damaged = damaged or bool(damages)
        click.echo("\n".join(damages or [f"{path.name} is whole"]))
    sys.exit(1 if damaged else 0)


@checkpoint.command("export")
@_RUN
@_TO
@_WHICH
@_PART
@_FORCE
def export_model(run: str | None, to: Path, name: str | None, part: str, force: bool) -> None:
    """Write the model alone, for other programs.

    Its state dict, as safetensors or for torch.load(weights_only=True).
    """
    from rankwise.checkpoint import export, folders

    path = folders.pick(folders.find(run), name)
    export.check_target(to, force)
    export.write(export.model_of(path, part), to)
    click.echo(f"{part} of {path.name} written to {to}")


@checkpoint.command("average")
@_RUN
@_TO
@click.option("--last", type=int, metavar="N", help="Of the last N.")
@click.option("--best", type=int, metavar="N", help="Of the best N.")
@_BY
@_LARGER
@_PART
@_FORCE
def average_model(
    run: str | None, to: Path, last: int | None, best: int | None, by: str | None, larger_is_better: bool | None, part: str,
    force: bool,
) -> None:  # fmt: skip
    """Write the mean of the models of several.

    Summed in float64. Counts and other integers are those of the newest.
    """
    from rankwise.checkpoint import export, folders
    from rankwise.checkpoint.best import Best

    paths = export.choose(folders.find(run), last, best, Best.of(by, larger_is_better))
    export.check_target(to, force)
    export.write(export.average(paths, part), to)
    click.echo(f"mean of {part} of {', '.join(path.name for path in paths)} written to {to}")


@checkpoint.command()
@_RUN
@click.option("--keep-last", type=int, metavar="N", help="The last N whole ones stay.  [default: 1]")
@click.option("--keep-best", type=int, metavar="N", help="So do the best N.")
@_BY
@_LARGER
@click.option("--older-than", metavar="AGE", help="Younger ones stay too: 12h, 7d, 2w.")
@click.option("--keep", multiple=True, metavar="STEP", help="This one stays; may be given again.")
@click.option("--yes", is_flag=True, help="Remove; else it is only said what would be.")
def prune(run: str | None, by: str | None, larger_is_better: bool | None, yes: bool, **rules: Any) -> None:
    """Remove those that no rule keeps.

    The newest that verifies is never removed.
    """
    from rankwise.checkpoint import folders, retention
    from rankwise.checkpoint.best import Best

    gone = retention.prunable(folders.find(run), by=Best.of(by, larger_is_better), **rules)
    for path in gone:
        click.echo(retention.removed(path) if yes else f"would remove {path}")
    if not yes:
        click.echo("to do it, type the same with --yes" if gone else "nothing to remove")
