"""The group of commands: prints each error as one line that says what was typed and what to type, also errors of click.

@click.group(cls=Group)
def main() -> None: ...
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import click

from rankwise.errors import EXIT_INTERRUPTED, ConfigError, RankwiseError
from rankwise.host import disk, terminal


class Group(click.Group):
    """Prints errors of rankwise and of click on one line; any other exception is a bug and keeps its traceback."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """As click's, but also works if standard streams are closed or cannot be written, and under PYTHONINSPECT."""
        terminal.open_closed_streams()
        terminal.print_any_text()
        lost, status = None, 0
        try:
            super().main(*args, **options)
        except SystemExit as end:
            status = int(end.code or 0)
        except OSError as error:
            if (lost := terminal.unwritten(sys.stdout, error)) is None and terminal.unwritten(sys.stderr, error) is None:
                raise
            status = 1 if lost is not None else 2  # 2: an error that cannot be printed
        if lost is None:
            lost = terminal.unwritten(sys.stdout)
        if lost:
            click.echo(f"rankwise: cannot write to the standard output: {lost}", err=True)
        terminal.leave(status or (1 if lost is not None else 0))

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> click.Context:
        words = list(args)  # click empties `args`
        with _printed():
            disk.check_current_folder()
            try:
                return super().make_context(info_name, args, *more, **extra)
            except click.NoSuchOption as error:
                name, run = error.option_name, self.commands.get("run")
                if run is None or name not in _spellings(run, click.Context(run)):
                    raise
                raise ConfigError(f"{name} is an option of run; type: {terminal.typed('run', *words)}") from None

    def invoke(self, ctx: click.Context) -> Any:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set in __main__; from here on, verbs clean up after Ctrl-C
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with _printed():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are defined, which is that of use; click sorts them."""
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0].endswith(".py"):
            raise ConfigError(f"{args[0]} is not a command; type: {terminal.typed('run', *args)}")
        if self.get_command(ctx, args[0]) is None:
            path = ctx.command_path.split()[1:]
            raise ConfigError(f"there is no command {' '.join((*path, args[0]))}; {_meant(args[0], self.commands, path)}")
        return super().resolve_command(ctx, args)


@contextlib.contextmanager
def _printed() -> Iterator[None]:
    """Print an error and exit with its status."""
    try:
        try:
            yield
        except FileNotFoundError:
            disk.check_current_folder()
            raise
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except RankwiseError as error:
        click.echo(terminal.message(str(error)), err=True)
        sys.exit(error.exit_status)
    except PermissionError as error:  # a file of another user's run, for example
        if error.filename is None:
            raise
        where = os.fsdecode(error.filename)
        click.echo(terminal.message(f"permission denied: {where}; ask its owner, or type this as its owner"), err=True)
        sys.exit(1)
    except click.UsageError as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
            raise
        click.echo(terminal.message(_answer(error)), err=True)
        sys.exit(error.exit_code)


def _answer(error: click.UsageError) -> str:
    """What was typed, and what to type instead."""
    if isinstance(error, click.BadOptionUsage):  # has no context
        return f"{error.option_name}: {'it takes no value' if 'not take' in error.message else 'its value is missing'}"
    if (ctx := error.ctx) is None:
        return error.format_message()
    path = ctx.command_path.split()[1:]
    verb = " ".join(path)
    match error:
        case click.NoSuchOption(option_name=name):
            what = f"{verb} has no option {name}" if verb else f"there is no option {name}"
            options = _spellings(ctx.command, ctx)
            meant = _meant(name, [each for each in options if each[:2] == name[:2] == "--"], path)
            of_script = "put options of the script after it; " if "argv" in options and meant[:5] == "type:" else ""
            return f"{what}; {of_script}{meant}"
        case click.MissingParameter(param=click.Parameter(param_type_name="argument", metavar=str(text))):
            return f"{text.split()[0]} is missing; type: {terminal.typed(*path)} {text}"
        case click.MissingParameter(param=click.Option(metavar=text, opts=[name, *_])):
            return f"{name} is missing; type: {terminal.typed(*path)} {name} {text}"
        case click.BadParameter(param=click.Parameter(opts=names)):
            value, number, kind = error.message.partition(" is not a valid ")
            must = f" {value}: it must be a {'whole ' * kind.startswith('int')}number" if number else f": {error.message}"
            return " / ".join(names) + must
    if (extra := re.search(r"unexpected extra arguments? \((.*)\)", error.message)) is not None:
        usage = [piece for piece in ctx.command.collect_usage_pieces(ctx) if piece != "[OPTIONS]"]
        return f"{extra[1]}: more arguments than {verb} takes; type: {' '.join((terminal.typed(*path), *usage))}"
    return error.message


def _meant(word: str, known: Iterable[str], path: list[str]) -> str:
    """The known word that was probably meant, or else where all are listed. Dashes in front are not compared."""
    from difflib import get_close_matches

    plain = {each.lstrip("-"): each for each in known}
    near = get_close_matches(word.lstrip("-"), plain, n=1, cutoff=0.75 if word.startswith("-") else 0.6)
    return f"did you mean {plain[near[0]]}?" if near else f"type: {terminal.typed(*path, '--help')}"


def _spellings(command: click.Command, ctx: click.Context) -> list[str]:
    return [spelled for p in command.get_params(ctx) for spelled in (*p.opts, *p.secondary_opts)]
