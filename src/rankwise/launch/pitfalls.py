"""What a script has from another launcher's manual that goes wrong under this one, found in its source.

for text in pitfalls(ast.parse(source)): say(f"warning: {text}")
"""

from __future__ import annotations

import ast
import re

_READS_ITS_RANK = ("RANK", "LOCAL_RANK")
_OF_OTHERS = re.compile(r"SLURM_(PROC|LOCAL)ID|OMPI_COMM_WORLD_(LOCAL_)?RANK|PMI_RANK|MPI_LOCALRANKID|HOROVOD_(LOCAL_)?RANK")
_SPAWN = re.compile(r"(.*\.)?(mp|multiprocessing)\.(spawn|start_processes)")
_ARGUMENTS = ("--local_rank", "--local-rank")


def pitfalls(tree: ast.Module) -> list[str]:
    """A sentence each. None for a script that takes its rank from torchrun's variables, or from rankwise, somewhere."""
    words = {node.value: node.lineno for node in _walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = _imported_from(tree)
    calls = [node for node in _walk(tree) if isinstance(node, ast.Call)]
    spawns = [call.lineno for call in calls if _SPAWN.fullmatch(names.get(ast.unparse(call.func), ast.unparse(call.func)))]
    if any(name in words for name in _READS_ITS_RANK):
        return []
    found = []
    if spawns:
        found.append(
            f"line {spawns[-1]} starts processes itself (torch.multiprocessing.spawn), and each rank does so again: type "
            "python in place of rankwise run, or call there what it spawns, with the rank that is in RANK"
        )
    if _imports_rankwise(tree):
        return found
    others = [(line, name) for name, line in words.items() if _OF_OTHERS.fullmatch(name)]
    if others:
        line, name = min(others)
        found.append(f"line {line} takes a rank from {name}: here it is in RANK, and in LOCAL_RANK which of its node's it is")
    if any(name in words for name in _ARGUMENTS):
        line = min(words[name] for name in _ARGUMENTS if name in words)
        found.append(f'line {line} takes --local_rank, which nobody gives here: read int(os.environ["LOCAL_RANK"])')
    return found


def _walk(tree: ast.Module) -> list[ast.AST]:
    """In the order of the source, the first use last: a dict of lines then holds that."""
    return sorted(ast.walk(tree), key=lambda node: -getattr(node, "lineno", 0))


def _imported_from(tree: ast.Module) -> dict[str, str]:
    """`from a.b import c as d`: d is a.b.c."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def _imports_rankwise(tree: ast.Module) -> bool:
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] == "rankwise" for name in names)
