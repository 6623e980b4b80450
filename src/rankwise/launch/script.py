"""What to run, and what is known about it before anything starts.

program = find(config)        # ConfigError if it does not exist, or does not compile
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from rankwise.dist import private_names
from rankwise.errors import ConfigError
from rankwise.host.disk import is_folder
from rankwise.host.terminal import typed
from rankwise.launch.caller import CODE, Caller, caller_of
from rankwise.launch.script_lint import ONLY_FOR_PYTHON, ScriptFacts, examine
from rankwise.run.config import RunConfig

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)?)?")


@dataclass(frozen=True)
class Program:
    """A script, a module (`interpreter` runs it, `argv` begins with `-m`), or a command (`interpreter` is empty)."""

    interpreter: tuple[str, ...]
    argv: tuple[str, ...]
    keep_cold: str | None = None
    """Why its ranks cannot be forked from a warm process; None if they can."""

    nccl_line: int | None = None
    """The line that certainly asks for NCCL; None if there is none."""

    pitfalls: tuple[str, ...] = ()
    """What goes wrong with more than one rank, one sentence each."""

    no_torch: str | None = None
    """A message if the script certainly imports torch and its Python has none; otherwise None."""

    @property
    def name(self) -> str:
        """The name that a person uses for it."""
        return self.caller.name_of(self.argv)

    @property
    def caller(self) -> Caller:
        return caller_of(self.argv)

    @property
    def run_name(self) -> str:
        """The name of its run unless another is given: a script's stem, a module, a command."""
        return Path(self.name).stem if self.interpreter and self.argv[0] != "-m" else Path(self.name).name


def find(config: RunConfig) -> Program:
    """Raises ConfigError, in one line, for a program that cannot run at all."""
    ours = (sys.executable, *_interpreter_flags())
    if caller_of(config.words) is CODE:
        ours += ("-P",)  # the module is ours: it must not import a secrets.py or platform.py of the current folder
    if config.command:
        program = _python_command(config.argv) or Program((), config.argv)
        if not program.interpreter:
            return _examine_command(program)
    else:
        program = Program(ours, config.words)
    if program.argv[0] == "-m":
        return _examine_module(program) if program.interpreter == ours else program
    facts = examine(program.argv[0])
    no_torch = None
    if facts.torch_line is not None and program.interpreter == ours and not _has_torch():
        there = shlex.join(program.argv)
        no_torch = (
            f"{program.name}, line {facts.torch_line}: it imports torch, but {sys.executable}, which runs rankwise, has none; "
            f"use the Python that has it: rankwise run -- /path/to/python {there}"
        )
    return Program(program.interpreter, program.argv, facts.keep_cold, facts.nccl_line, facts.pitfalls, no_torch)


def _python_command(argv: tuple[str, ...]) -> Program | None:
    """`python -u train.py --lr 1` after a `--`: a script of another interpreter, whose ranks can be forked like those of any
    script."""
    if not _PYTHON.fullmatch(Path(argv[0]).name):
        return None
    found = shutil.which(argv[0])
    position = 1
    while position < len(argv) and re.fullmatch(r"-[uOBEsSvbdqP]+|-[WX].+", argv[position]):
        position += 1
    rest = argv[position:]
    if found is None or not rest or (rest[0].startswith("-") and (rest[0] != "-m" or len(rest) < 2)) or _is_no_text(rest[0]):
        return None
    return Program((found, *argv[1:position]), rest)


def _is_no_text(path: str) -> bool:
    """Whether it is an application that only Python itself can run: an archive, compiled code, or a folder."""
    return path.endswith(ONLY_FOR_PYTHON) or is_folder(path)


def _interpreter_flags() -> list[str]:
    """The options of this Python (-O -u -W -X), for the ranks; not -P and -I, which hide the script's folder."""
    return [flag for flag in private_names.interpreter_flags() if flag not in ("-P", "-I")]


def _examine_command(program: Program) -> Program:
    command = program.argv[0]
    if shutil.which(command) is None:
        path = f"./{command}" if command.startswith("-") else command  # otherwise it would look like an option
        hint = f"; for a Python script, type: {typed('run', path, *program.argv[1:])}" if command.endswith(".py") else ""
        if not hint and "/" not in command and os.access(command, os.X_OK) and Path(command).is_file():
            hint = f"; for the file in this folder, type: {typed('run', '--', f'./{command}', *program.argv[1:])}"
        raise ConfigError(f"there is no command {command} (it is not on the PATH, or cannot be executed){hint}")
    return program


def _examine_module(program: Program) -> Program:
    name = program.argv[1]
    sys.path.insert(0, os.getcwd())
    try:
        spec = _spec_of(name)
    finally:
        sys.path.pop(0)
    if spec is None:
        script = program.argv[1:] if Path(name).is_file() else ("script.py",)
        raise ConfigError(f"there is no module {name} (from {os.getcwd()}); for a script, type: {typed('run', *script)}")
    if spec.submodule_search_locations is not None:
        main = [Path(folder, "__main__.py") for folder in spec.submodule_search_locations]
        origin = next((str(path) for path in main if path.exists()), None)
        if origin is None:
            raise ConfigError(f"{name} is a package without __main__.py and cannot be run")
    else:
        origin = spec.origin
    facts = examine(origin) if origin is not None and origin.endswith(".py") else ScriptFacts(None)
    return Program(program.interpreter, program.argv, facts.keep_cold, facts.nccl_line, facts.pitfalls)


def _spec_of(name: str) -> ModuleSpec | None:
    """Like importlib.util.find_spec, but imports no package: that may take long, or fail, which is for the ranks to report."""
    top, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
        for depth, _ in enumerate(inner, start=2):
            if spec is None or spec.submodule_search_locations is None:
                return None
            spec = PathFinder.find_spec(".".join([top, *inner][:depth]), spec.submodule_search_locations)
    except (ImportError, ValueError):
        return None
    return spec


def _has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):
        return False
