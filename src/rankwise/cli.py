"""The command `rankwise`: verbs parse, call and print; no logic."""

from __future__ import annotations

import json
import sys
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


@click.group(cls=_Group, context_settings=_HELP)
@click.version_option(package_name="rankwise", message="%(prog)s %(version)s")
def main() -> None:
    """Run a training script, written for one device, on all devices."""


@main.command(
    context_settings={**_HELP, "ignore_unknown_options": False, "allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.option("--nproc", default="auto", show_default=True, metavar="N|auto",
              help="Ranks on this machine; auto is one a GPU, or one a physical core where there is no GPU.")  # fmt: skip
@click.option("--name", metavar="RUN", help="Name of the run; the script's stem by default.")
@click.option("--run-dir", metavar="DIR", help="Where the run writes; ./runs/RUN by default.")
@click.option("--fresh", is_flag=True, help="Move an older run aside and start anew, instead of going on with it.")
@click.option("--grace", "grace_s", type=float, default=120.0, show_default=True, metavar="SECONDS",
              help="How long ranks may take to stop when asked, before they are killed.")  # fmt: skip
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.py [ITS ARGUMENTS]...")
def run(argv: tuple[str, ...], **settings: Any) -> None:
    """Run SCRIPT.py on every device of this machine.

    What follows SCRIPT.py is its own. A run that was stopped goes on when the same command is typed again.
    """
    import os

    from rankwise.config import RunConfig
    from rankwise.launch.launch import launch

    sys.exit(launch(RunConfig(argv=argv, **settings), os.environ))


@main.command()
@click.argument("run", metavar="RUN")
def report(run: str) -> None:
    """Tell what a run did: its lives, its loss, where its time went.

    RUN is a name under ./runs, or a folder.
    """
    from rankwise.report.terminal import print_report

    print_report(run)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON: rank, local_rank, world_size, ..., source, origin, error.")
@click.option("--allow-independent", is_flag=True,
              help="One of several processes that nothing has joined is then a training of its own.")  # fmt: skip
def explain(as_json: bool, allow_independent: bool) -> None:
    """Tell which rank a process started here is, and from which variable each number comes.

    Put it where the script would stand: srun rankwise explain. Exit status 2 means that the script would not start.
    """
    import os

    from rankwise import world
    from rankwise.report.explain import as_record, as_text

    told = world.explain(os.environ, allow_independent=allow_independent)
    click.echo(json.dumps(as_record(told), indent=2) if as_json else as_text(told))
    if told.error is not None:
        raise told.error
