"""Reads the text of a script with DDP: whether all ranks would train on the same samples, or in the same order in every epoch.

pitfalls_of_ddp(ast.parse(source))      # ["line 12 creates a DataLoader without a sampler, so every rank ..."]
"""

from __future__ import annotations

import ast
import re

_WRAPPERS = ("DDP", "DistributedDataParallel")
_DIVIDERS = re.compile(
    r"(?!(random|weightedrandom|subsetrandom|sequential)sampler$).*sampler.*|.*shard.*|split_dataset_by_node|.*iterabledataset"
    r"|.*streamingdataset|.*webdataset|wds|resampled|prepare|setup_dataloaders",
    re.IGNORECASE,
)
_RANKS = re.compile(r".*(world_?size|num_?(replicas|ranks)|n_?ranks).*|(?!.*local).*rank.*", re.IGNORECASE)
"""Names of a rank (not the local one, which is a device) and of the number of ranks."""

_OTHER_USES = re.compile(r".*(batch|lr|learning|worker|device|gpu).*", re.IGNORECASE)
"""A number of ranks in an expression with one of these does not divide data: `batch_size // world_size`."""

_PASSED_TO = {"init_process_group", "spawn", "print", "str", "int", "format", "info", "device", "set_device", "to", "cuda"}
"""Functions that may get a rank and divide no data."""

_EVALUATES = re.compile(r".*(val|test|eval|dev).*", re.IGNORECASE)


def pitfalls_of_ddp(tree: ast.Module) -> list[str]:
    """One sentence, or none: also none if the script may divide its data by rank itself, because nobody can switch off a
    wrong warning."""
    calls = [(call, _name(call.func)) for call in ast.walk(tree) if isinstance(call, ast.Call)]
    called = {name for _, name in calls}
    if called.isdisjoint(_WRAPPERS):
        return []
    if "DistributedSampler" in called:
        shuffling = [call.lineno for call, name in calls if name == "DistributedSampler" and _shuffles(call)]
        epochs = [node for node in ast.walk(tree) if isinstance(node, ast.For) and "epoch" in _name(node.target).lower()]
        if not shuffling or not epochs or "set_epoch" in called:
            return []
        return [
            f"line {min(shuffling)} creates a DistributedSampler, and no line calls its set_epoch, so every epoch has the same "
            "order: call sampler.set_epoch(epoch) at the start of each epoch"
        ]
    loaders = [call for call, name in calls if name == "DataLoader" and id(call) not in _for_evaluation(tree)]
    given = {word.arg for call in loaders for word in call.keywords}
    positional = any(len(call.args) > 3 for call in loaders)
    if not loaders or positional or given & {"sampler", "batch_sampler", None} or _may_divide(tree):
        return []
    instead = " instead of shuffle=True" if "shuffle" in given else ""
    return [
        f"line {min(call.lineno for call in loaders)} creates a DataLoader without a sampler, so every rank reads all samples: "
        f"pass sampler=DistributedSampler(dataset){instead}, unless the dataset divides its samples by rank"
    ]


def _name(node: ast.expr) -> str:
    """`c` of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _shuffles(sampler: ast.Call) -> bool:
    """Whether a DistributedSampler certainly shuffles, as it does by default."""
    given = [word.value for word in sampler.keywords if word.arg in ("shuffle", None)] + sampler.args[3:4]
    return all(isinstance(value, ast.Constant) and value.value is True for value in given)


def _for_evaluation(tree: ast.Module) -> set[int]:
    """The ids of the values that are assigned to names such as `val_loader`."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    return {id(node.value) for node in assigned if all(_EVALUATES.fullmatch(_name(target)) for target in node.targets)}


def _may_divide(tree: ast.Module) -> bool:
    """Whether the script uses something that divides data by rank, or computes with a rank or the number of ranks."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    harmless = _PASSED_TO | own | {*_WRAPPERS}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.keyword(arg=str(name)):
                if _DIVIDERS.fullmatch(name) or name == "Loader":  # rankwise.Loader
                    return True
            case ast.Slice(step=ast.Name() | ast.Attribute() | ast.Call()) | ast.Yield() | ast.YieldFrom():
                return True
            case ast.Subscript(slice=inside) if _has_rank(inside):
                return True
            case ast.BinOp(op=ast.Mult() | ast.Mod() | ast.FloorDiv()) if _has_rank(node):
                return True
            case ast.Call() if _name(node.func) not in harmless and any(map(_has_rank, _arguments(node))):
                return True
    return False


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(word.value for word in call.keywords)]


def _has_rank(node: ast.expr) -> bool:
    names = [_name(each) for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)]
    return any(map(_RANKS.fullmatch, names)) and not any(map(_OTHER_USES.fullmatch, names))
