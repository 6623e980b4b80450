"""Whether a script is certain to ask for NCCL, which a machine without a GPU, or a torch without CUDA, cannot give.

line = asks_for_nccl(ast.parse(source));  why = why_not_nccl(env, interpreter)

Certain is what runs whatever happens: the module's own statements, what stands under `if __name__ == "__main__"`, and the
functions of the script that these call. Nothing under a condition, a loop, a `try` or a `with`, and nothing behind a place
where the script may leave, counts: there it may well know what it does.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rankwise.host import machine

_CALL = re.compile(r"((torch\.)?(distributed|dist)\.)?init_process_group")
_BRANCHES = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith, ast.Match, ast.IfExp, ast.BoolOp),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    *(ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
)
_ENDS = (ast.Raise, ast.Assert)
_LEAVING_CALL = re.compile(r"(sys\.)?exit|quit|os\._exit|os\.exec\w+|os\.abort")


def why_not_nccl(env: Mapping[str, str], interpreter: Sequence[str], dev: Path = Path("/dev")) -> str | None:
    """Why no rank can use NCCL here; None if one may."""
    if env.get("CUDA_VISIBLE_DEVICES") is not None and machine.gpus(env, dev) == 0:
        return f"CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']} hides every GPU"
    # AMD's driver, Jetson's and the one of Windows' Linux have other names than /dev/nvidia0.
    if not any(any(dev.glob(name)) for name in ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")):
        return "this machine has no GPU"
    build = machine.torch_build() if interpreter[:1] == (sys.executable,) else None
    if build is None or build.built_for & {"cuda", "hip"}:
        return None
    return f"the installed torch {build.version} is built without CUDA"


def asks_for_nccl(tree: ast.Module) -> int | None:
    """The line of a call of init_process_group with the backend nccl that is certain to run; None without one."""
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
    """The calls that are certain to be made, in no exact order within a statement, up to where the script may leave."""
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
    """Whether to call it is to run it: no generator, and no decorator but torch's `record`."""
    decorated = [d for d in function.decorator_list if ast.unparse(d).rpartition(".")[2] != "record"]
    return not decorated and not any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))


def _may_leave(statement: ast.stmt, functions: Mapping[str, ast.FunctionDef]) -> bool:
    """Whether what follows it may not run: it returns, or it or a function of the script that it calls may raise or exit."""
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
