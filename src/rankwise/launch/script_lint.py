"""Reads the text of a script before anything starts: finds out whether it compiles, and what will go wrong.

facts = examine("train.py");  facts.pitfalls;  facts.nccl_line;  facts.torch_line;  facts.keep_cold
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankwise.errors import ConfigError
from rankwise.host.terminal import typed
from rankwise.launch.ddp_lint import pitfalls_of_ddp

_LONGEST_SHOWN = 120
ONLY_FOR_PYTHON = (".pyz", ".zip", ".pyc")
"""Applications that Python runs, and whose text cannot be read."""

_OF_ONE_PROCESS = ("/dev/stdin", "/dev/fd/", "/proc/")


@dataclass(frozen=True)
class ScriptFacts:
    """What the script's text shows; Program explains each field."""

    keep_cold: str | None
    nccl_line: int | None = None
    pitfalls: tuple[str, ...] = ()
    torch_line: int | None = None


def examine(script: str) -> ScriptFacts:
    """Raises ConfigError, in one line, for a script that cannot run at all."""
    path = Path(script)
    if not script:
        raise ConfigError("the name of the script is empty; type: rankwise run script.py [its arguments]")
    if path.is_dir():
        example = shlex.quote(f"{script.rstrip('/')}/train.py")
        raise ConfigError(f"{script} is a folder; give the script that trains, for example {example}")
    if path.exists() and (not path.is_file() or script.startswith(_OF_ONE_PROCESS)):
        raise ConfigError(f"{script} is not a file that each rank can read; write the script to a file, and give its name")
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        near = difflib.get_close_matches(path.stem, [each.stem for each in path.parent.glob("*.py")], n=1)
        meant = f"; did you mean {path.with_name(near[0] + '.py')}?" if near else ""
        raise ConfigError(f"there is no script {script} (in {os.getcwd()}){meant}") from None
    except OSError as error:
        raise ConfigError(f"the script {script} cannot be read: {error.strerror} (in {os.getcwd()})") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python prints the warnings when the ranks run the script
            tree = ast.parse(source, filename=script)
    except RecursionError:
        return ScriptFacts(None)
    except (SyntaxError, ValueError) as error:
        where = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        needs_python = script.endswith(ONLY_FOR_PYTHON) and not os.access(script, os.X_OK)
        command = ["python", script] if needs_python else [script if "/" in script else f"./{script}"]
        hint = (
            ""
            if path.suffix in (".py", "")
            else f"; for a command that is not a Python script, type: {typed('run', '--', *command)}"
        )
        raise ConfigError(f"{script}{where}: syntax error: {what}{hint}{_shown(error)}") from None
    try:
        return _facts(tree, source)
    except RecursionError:  # an expression of hundreds of parts, which Python itself can run
        return ScriptFacts(None)


def _facts(tree: ast.Module, source: bytes) -> ScriptFacts:
    line = _environment_write_before_torch(tree)
    return ScriptFacts(
        keep_cold=f"line {line} sets environment variables before torch is imported" if line else None,
        # A script that sets *_VISIBLE_DEVICES may choose its devices itself.
        nccl_line=asks_for_nccl(tree) if b"VISIBLE_DEVICES" not in source else None,
        pitfalls=(*pitfalls(tree), *pitfalls_of_ddp(tree)),
        torch_line=_import_of_torch(tree),
    )


def _shown(error: SyntaxError | ValueError) -> str:
    """The line of the source with a mark below the place, as Python shows it; empty if the place is not known."""
    if not isinstance(error, SyntaxError) or not error.text or not error.offset:
        return ""
    text = error.text.rstrip("\n")
    begin = len(text) - len(text.lstrip())
    place = min(max(error.offset - 1, begin), len(text))
    if len(text) - begin > _LONGEST_SHOWN:
        return ""
    return f"\n    {text[begin:]}\n    {' ' * (place - begin)}^"


# --- habits of other launchers

_READS_ITS_RANK = ("RANK", "LOCAL_RANK")
_OF_OTHERS = re.compile(r"SLURM_(PROC|LOCAL)ID|OMPI_COMM_WORLD_(LOCAL_)?RANK|PMI_RANK|MPI_LOCALRANKID|HOROVOD_(LOCAL_)?RANK")
_SPAWN = re.compile(r"(.*\.)?(mp|multiprocessing)\.(spawn|start_processes)")
_ARGUMENTS = ("--local_rank", "--local-rank")


def pitfalls(tree: ast.Module) -> list[str]:
    """What goes wrong with several ranks, one sentence each. A script that reads torchrun's variables has no pitfalls; one that
    imports rankwise can only have that of starting processes."""
    words = {node.value: node.lineno for node in _walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = _imported_from(tree)
    calls = [node for node in _walk(tree) if isinstance(node, ast.Call)]
    spawns = [call.lineno for call in calls if _SPAWN.fullmatch(names.get(ast.unparse(call.func), ast.unparse(call.func)))]
    if any(name in words for name in _READS_ITS_RANK):
        return []
    found = []
    if spawns:
        found.append(
            f"line {spawns[-1]} starts processes itself (torch.multiprocessing.spawn), and each rank would start them again: "
            "use python instead of rankwise run, or call the function that it spawns with int(os.environ['RANK'])"
        )
    if _imports_rankwise(tree):
        return found
    others = [(line, name) for name, line in words.items() if _OF_OTHERS.fullmatch(name)]
    if others:
        line, name = min(others)
        found.append(f"line {line} reads a rank from {name}: rankwise sets RANK, and LOCAL_RANK for the rank within its node")
    if any(name in words for name in _ARGUMENTS) and _uses_local_rank(tree):
        line = min(words[name] for name in _ARGUMENTS if name in words)
        found.append(f'line {line} expects --local_rank, which rankwise does not pass: read int(os.environ["LOCAL_RANK"])')
    return found


def _uses_local_rank(tree: ast.Module) -> bool:
    """Whether the script may use the value of its argument. timm, DINO and MAE only accept it, and read LOCAL_RANK in another
    file."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="local_rank") | ast.Name(id="local_rank") | ast.arg(arg="local_rank"):
                return True
            case ast.Constant(value="local_rank"):
                return True
            case ast.Call(args=[*names], keywords=[*words]) if any(word.arg == "dest" for word in words):
                if any(isinstance(name, ast.Constant) and name.value in _ARGUMENTS for name in names):
                    return True
    return False


def _walk(tree: ast.Module) -> list[ast.AST]:
    """All nodes, from the last line of the source to the first: a dict of lines then keeps the first use."""
    return sorted(ast.walk(tree), key=lambda node: -getattr(node, "lineno", 0))


def _imported_from(tree: ast.Module) -> dict[str, str]:
    """`from a.b import c as d`: d is a.b.c."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def _imports_rankwise(tree: ast.Module) -> bool:
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] == "rankwise" for name in names)


# --- whether it certainly asks for NCCL, which a machine without a GPU, or a torch without CUDA, does not have
#
# Certain is what always runs: the module's own statements, those under `if __name__ == "__main__"`, and the functions of the
# script that these call. Code under a condition, a loop, a `try` or a `with` does not count, nor code after a place where the
# script may exit: the script may have checked the machine there.

_CALL = re.compile(r"((torch\.)?(distributed|dist)\.)?init_process_group")
_BRANCHES = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith, ast.Match, ast.IfExp, ast.BoolOp),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    *(ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
)
_ENDS = (ast.Raise, ast.Assert)
_LEAVING_CALL = re.compile(r"(sys\.)?exit|quit|os\._exit|os\.exec\w+|os\.abort")


def asks_for_nccl(tree: ast.Module) -> int | None:
    """The line of a call of init_process_group with the backend nccl that certainly runs; None if there is none."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "init_process_group" in functions:
        return None
    for call in _certain_calls(tree.body, functions, ()):
        if _CALL.fullmatch(ast.unparse(call.func)) and _backend(call) == "nccl":
            return call.lineno
    return None


def _backend(call: ast.Call) -> str | None:
    words = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "backend")]
    name = words[0].value if words and isinstance(words[0], ast.Constant) else None
    return name.lower() if isinstance(name, str) else None


def _certain_calls(
    body: Sequence[ast.stmt], functions: Mapping[str, ast.FunctionDef], inside: tuple[str, ...]
) -> Iterator[ast.Call]:
    """The calls that are certainly made, up to where the script may exit; within a statement, in no exact order."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if _is_main_guard(statement):
            assert isinstance(statement, ast.If)
            yield from _certain_calls(statement.body, functions, inside)
        for call in _unconditional(statement) if not isinstance(statement, _BRANCHES) else ():
            yield call
            name = ast.unparse(call.func)
            if name in functions and name not in inside and _is_plain(functions[name]):
                yield from _certain_calls(functions[name].body, functions, (*inside, name))
        if _may_leave(statement, functions):
            return


def _unconditional(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _BRANCHES):
            yield from _unconditional(child)


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    )


def _is_plain(function: ast.FunctionDef) -> bool:
    """Whether calling it runs its body: it is no generator, and has no decorator except torch's `record`."""
    decorated = [d for d in function.decorator_list if ast.unparse(d).rpartition(".")[2] != "record"]
    return not decorated and not any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))


def _may_leave(statement: ast.stmt, functions: Mapping[str, ast.FunctionDef]) -> bool:
    """Whether the code after it may not run: it returns, or it or a function of the script that it calls may raise or exit."""
    if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
        return True
    seen: set[str] = set()
    waiting: list[ast.AST] = [statement]
    while waiting:
        for node in ast.walk(waiting.pop()):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, _ENDS) or _LEAVING_CALL.fullmatch(name):
                return True
            if name in functions and name not in seen:
                seen.add(name)
                waiting.append(functions[name])
    return False


# --- where the script imports torch, and whether it changes the environment before


def _import_of_torch(tree: ast.Module) -> int | None:
    """The line of an import of torch that certainly runs: a statement of the module itself."""
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        if any(name.split(".")[0] == "torch" for name in names):
            return node.lineno
    return None


def _environment_write_before_torch(tree: ast.Module) -> int | None:
    """The line of a write to os.environ that runs before the first import of torch. torch reads its variables when it is
    imported, and in a forked rank it is imported already."""
    for node in _executed(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            if any(name.split(".")[0] == "torch" for name in names):
                return None
        if _writes_environment(node):
            return getattr(node, "lineno", 1)
    return None


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module runs, in order: not the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _executed(child)


def _writes_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return _is_environ(node.target) or _holds_item_of_environ(node.target)
    if isinstance(node, ast.Assign | ast.Delete):
        return any(_holds_item_of_environ(target) for target in node.targets)
    if isinstance(node, ast.Call):
        if ast.unparse(node.func) in ("os.putenv", "putenv", "os.unsetenv", "unsetenv"):
            return True
        return isinstance(node.func, ast.Attribute) and _is_environ(node.func.value) and node.func.attr in _WRITERS
    return False


_WRITERS = ("update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__")


def _holds_item_of_environ(target: ast.expr) -> bool:
    return any(isinstance(t, ast.Subscript) and _is_environ(t.value) for t in ast.walk(target))


def _is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ", "os.environb", "environb")
