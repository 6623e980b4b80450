"""Reads the text of a script with DDP or FSDP: whether all ranks would train on the same samples, or each epoch in one order.

pitfalls_of_ddp(ast.parse(source))      # ["line 12 creates a DataLoader without a sampler, so every rank ..."]
"""

from __future__ import annotations

import ast
import re

_WRAPPERS = {"DDP", "DistributedDataParallel", "FSDP", "FullyShardedDataParallel", "fully_shard"}
_DIVIDES_LAYERS = {"parallelize_module", "context_parallel", "PipelineStage"}
"""With these, some ranks need the same samples."""

_DIVIDERS = re.compile(
    r"(?!(random|weightedrandom|subsetrandom|sequential)sampler$).*sampler.*"
    r"|(?!fully?_?shard|_?hybrid_shard|shard_grad_op|reshard|shard(ed|ing)_?(grad|optim|state|strategy)).*shard.*"
    r"|split_dataset_by_node|.*iterabledataset|.*streamingdataset|.*webdataset|wds|resampled|prepare|setup_dataloaders",
    re.IGNORECASE,
)
_NUMBER_OF_RANKS = re.compile(r".*(world_?size|num_?(replicas|ranks)|n_?ranks).*", re.IGNORECASE)
_RANK = re.compile(r"(?!.*(local|ranks)).*rank.*", re.IGNORECASE)
"""Not the local one, which is a device."""

_OTHER_USES = re.compile(r".*batch.*|lr|lr_.*|.*_lr|.*learning.*|.*worker.*", re.IGNORECASE)
"""A number of ranks in an expression with one of these does not divide data: `batch_size // world_size`."""

_DEVICES = re.compile(r".*(device|gpu).*", re.IGNORECASE)
"""Nor does a rank with one of these: `rank % device_count`."""

_PASSED_TO = re.compile(
    r"init.*|setup.*|cleanup.*|main|run|train.*|demo.*|worker|spawn|print|str|int|format|info|get|getenv|set_device|device|to|cuda"
    r"|DDP|DistributedDataParallel|FSDP|FullyShardedDataParallel|fully_shard"
)
"""Functions that may get a rank and divide no data."""

_EVALUATES = re.compile(r".*(val|test|eval|dev).*", re.IGNORECASE)


def pitfalls_of_ddp(tree: ast.Module) -> list[str]:
    """One sentence, or none: also none if the script may divide its data by rank itself, because nobody can switch off a
    wrong warning."""
    calls = [(call, _name(call.func)) for call in ast.walk(tree) if isinstance(call, ast.Call)]
    called = {name for _, name in calls}
    if called.isdisjoint(_WRAPPERS) or not called.isdisjoint(_DIVIDES_LAYERS):
        return []
    evaluating = _for_evaluation(tree)
    if "DistributedSampler" in called:
        of_training = [call for call, name in calls if name == "DistributedSampler" and id(call) not in evaluating]
        shuffling = [call.lineno for call in of_training if _shuffles(call)]
        epochs = [node for node in ast.walk(tree) if isinstance(node, ast.For) and _is_of_epochs(node)]
        if not shuffling or not epochs or _may_set_epoch(tree, epochs):
            return []
        return [
            f"line {min(shuffling)} creates a DistributedSampler, and no line calls its set_epoch, so every epoch has the same "
            "order: call sampler.set_epoch(epoch) at the start of each epoch"
        ]
    loaders = [call for call, name in calls if name == "DataLoader" and id(call) not in evaluating]
    given = {word.arg for call in loaders for word in call.keywords}
    positional = any(len(call.args) > 3 or any(isinstance(each, ast.Starred) for each in call.args) for call in loaders)
    if not loaders or positional or given & {"sampler", "batch_sampler", None} or _may_divide(tree):
        return []
    first = min(loaders, key=lambda call: call.lineno)
    shuffle = [word.value for word in first.keywords if word.arg == "shuffle"] + first.args[2:3]
    in_order = any(isinstance(value, ast.Constant) and value.value is False for value in shuffle)
    return [
        f"line {first.lineno} creates a DataLoader without a sampler, so every rank reads all samples: pass sampler="
        f"DistributedSampler(dataset{', shuffle=False' if in_order else ''}){' instead of shuffle' if shuffle else ''}, unless "
        "the dataset divides its samples by rank"
    ]


def _name(node: ast.expr) -> str:
    """`c` of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_of_epochs(loop: ast.For) -> bool:
    """Whether a loop is one over epochs: `for epoch in ...`, `for ep in range(...)`, `for _ in range(args.epochs)`."""
    counts = isinstance(loop.iter, ast.Call) and _name(loop.iter.func) in ("range", "trange")
    names = [loop.target, *(each for each in ast.walk(loop.iter) if counts and isinstance(each, ast.expr))]
    return any("epoch" in _name(each).lower() for each in names) or (counts and _name(loop.target) in ("e", "ep"))


def _may_set_epoch(tree: ast.Module, epochs: list[ast.For]) -> bool:
    """Whether the script has the name set_epoch, or passes the number of the epoch to a function that it does not define."""
    for node in ast.walk(tree):
        if (isinstance(node, ast.Attribute) and node.attr == "set_epoch") or getattr(node, "value", None) == "set_epoch":
            return True
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} | {"print", "format", "str", "int"}
    for loop in epochs:
        inside = [node for part in loop.body for node in ast.walk(part)]
        calls = [node for node in inside if isinstance(node, ast.Call) and _name(node.func) not in own]
        names = [_name(each) for call in calls for each in _arguments(call)]
        if any("epoch" in name.lower() or name == _name(loop.target) != "" for name in names):
            return True
    return False


def _shuffles(sampler: ast.Call) -> bool:
    """Whether a DistributedSampler certainly shuffles, as it does by default."""
    if any(isinstance(each, ast.Starred) for each in sampler.args):
        return False
    given = [word.value for word in sampler.keywords if word.arg in ("shuffle", None)] + sampler.args[3:4]
    return all(isinstance(value, ast.Constant) and value.value is True for value in given)


def _for_evaluation(tree: ast.Module) -> set[int]:
    """The ids of the values that are assigned to names such as `val_loader`."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    return {id(node.value) for node in assigned if all(_EVALUATES.fullmatch(_name(target)) for target in node.targets)}


def _may_divide(tree: ast.Module) -> bool:
    """Whether the script uses something that divides data by rank, or computes with a rank or the number of ranks."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        match node:
            case ast.alias() if (node.asname or node.name.partition(".")[0]) not in used:
                continue  # left over
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.keyword(arg=str(name)):
                if _DIVIDERS.fullmatch(name) or name == "Loader":  # rankwise.Loader
                    return True
            case ast.Slice(step=ast.Name() | ast.Attribute() | ast.Call()) | ast.Yield() | ast.YieldFrom():
                return True
            case ast.Subscript(slice=inside, value=held) if _has_rank(inside) and _name(held) != "environ":
                return True
            case ast.Assign(value=ast.JoinedStr() | ast.BinOp(op=ast.Add() | ast.Div()) as made) if _has_rank(made):
                return True
            case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="format")) if any(map(_has_rank, node.args)):
                return True
            case ast.BinOp(op=ast.Mult() | ast.Mod() | ast.FloorDiv()) if _has_rank(node):
                return True
            case ast.Call() if not _PASSED_TO.fullmatch(_name(node.func)) and any(map(_has_rank, _arguments(node))):
                return True
    return False


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(word.value for word in call.keywords)]


def _has_rank(node: ast.expr) -> bool:
    """Whether an expression may divide data: it has a rank or the number of ranks, and not only for the size of a batch, the
    learning rate or a device."""
    names = [_name(each) for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)]
    names += [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and each.value in ("RANK", "WORLD_SIZE")]
    if any(map(_RANK.fullmatch, names)):
        return not any(map(_DEVICES.fullmatch, names))
    return any(map(_NUMBER_OF_RANKS.fullmatch, names)) and not any(map(_OTHER_USES.fullmatch, names))
