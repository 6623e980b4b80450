"""Compares what the ranks of a script have done: with each other, and on different numbers of ranks. Without torch.

findings = compare({1: records, 2: records}, gradients)       # a record: what instrument.py has written on a rank
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from rankwise.checks.difference import TOLERANCES, Arrays, difference, factor
from rankwise.checks.finding import FAILED, KNOWN, OK, OPEN, Finding
from rankwise.host.text import count, listed

Record = Mapping[str, Any]
Starts = Mapping[int, Sequence[Record]]
"""By the number of ranks: the record of each rank."""

Gradients = Callable[[int, int], Arrays]
"""(number of ranks, rank) -> the gradients of its first step."""


def compare(starts: Starts, gradients: Gradients) -> list[Finding]:
    """The findings, several per check and not yet combined. On each number of ranks, at least one rank must have taken a
    step."""
    findings = []
    for ranks, records in starts.items():
        findings += _order(ranks, records)
        if ranks > 1:
            findings += [_weights(records), _samples(records), compare_draws([record["draws"] for record in records])]
            findings += [_steps(records), *_between_ranks(records, gradients)]
    return [*findings, _between_starts(starts, gradients)]


def first_apart(told: Sequence[Mapping[str, str]], who: Sequence[str] = ()) -> str | None:
    """Which tensor differs, and between which two; None if all are the same. `who`: their names; by default, ranks."""
    for name in told[0] if told else ():
        for number, other in enumerate(told):
            if other.get(name) != told[0][name]:
                names = (who[0], who[number]) if who else ("rank 0", f"rank {number}")
                return f"{name} differs between {names[0]} and {names[1]}"
    return None


def _weights(records: Sequence[Record]) -> Finding:
    here = count(len(records), "rank")
    apart = first_apart([record["start"] for record in records if record["taken"]])
    if apart is None:
        return Finding("weights", OK, "the same on {}", where=str(len(records)))
    return Finding(
        "weights", FAILED, f"on {here}: {apart}", "the ranks do not start with the same model",
        "before the first step, DistributedDataParallel(model) or sync.attach(model, optimizer) sends rank 0's weights to all",
    )  # fmt: skip


# --- data


def _samples(records: Sequence[Record]) -> Finding:
    here = f"on {count(len(records), 'rank')}"
    steps = list(zip(*(record["batches"] for record in records), strict=False))
    taken = [list(map(_key, batch)) for step in steps for batch in step]
    if not taken or not any(taken):
        return Finding("samples", OPEN, f"{here}: no DataLoader or rankwise.Loader was seen that gives the model its batches")
    if not any(one["trained"] for record in records for one in record["passes"]):
        return _samples_by_hand(steps, here, len(records))
    for number, step in enumerate(steps):
        seen = Counter(_key(sample) for batch in step for sample in set(map(_key, batch)))
        twice = sum(count - 1 for count in seen.values())
        if not twice:
            continue
        padding = max((loader.get("padding", 0) for loader in records[0]["loaders"]), default=0)
        if twice <= padding:
            return Finding(
                "samples", KNOWN, f"{here}: {twice} of batch {number + 1} on two ranks",
                "DistributedSampler repeats samples to fill up the last batches of an epoch",
                "none in training; evaluate with rankwise.Loader or rankwise.Evaluate, which repeat nothing",
            )  # fmt: skip
        alike = all(batch == step[0] for batch in step)
        what = "all ranks take the same samples" if alike else f"{twice} of {sum(map(len, step))} are taken by two ranks"
        return Finding(
            "samples", FAILED, f"{here}, batch {number + 1}: {what}", "nothing divides the data among the ranks",
            "after rankwise.init(), rankwise.Loader(dataset, global_batch_size=...), or DataLoader(dataset, "
            "sampler=DistributedSampler(dataset, rankwise.world_size(), rankwise.rank()))",
        )  # fmt: skip
    return Finding("samples", OK, f"{len(steps)} batches, no sample twice on {{}}", where=str(len(records)))


def _samples_by_hand(steps: Sequence[Sequence[Sequence[Any]]], here: str, ranks: int) -> Finding:
    """Of batches that the script makes itself: the rows of the model's inputs, which may be equal by chance or on purpose."""
    if all(batch == step[0] for step in steps for batch in step):
        if all(step[0] == steps[0][0] for step in steps):
            return Finding("samples", OPEN, f"{here}: the inputs of the model are always the same")
        return Finding(
            "samples", FAILED, f"{here}: all ranks make the same batches, {count(len(steps), 'time')}",
            "the ranks draw their batches with the same seed, or take the same part of the data",
            "draw with another seed on each rank, torch.manual_seed(seed + rank), or use rankwise.Loader",
        )  # fmt: skip
    if any(set(one) & set(other) for step in steps for one, other in combinations(step, 2)):
        return Finding("samples", OPEN, f"{here}: some inputs of the model are equal on two ranks, which may be chance")
    return Finding("samples", OK, f"{len(steps)} batches of the script, no input of the model twice on {{}}", where=str(ranks))


def _key(sample: Any) -> Any:
    return tuple(sample) if isinstance(sample, list) else sample


def _order(ranks: int, records: Sequence[Record]) -> list[Finding]:
    """Whether a shuffling loader has another order in its second pass; empty if there was only one pass."""
    record = records[0]
    for number, loader in enumerate(record["loaders"]):
        passes = [p["samples"] for p in record["passes"] if p["loader"] == number and p["trained"] and p["samples"]]
        if len(passes) < 2 or not loader.get("shuffle"):
            continue
        first, second = passes[:2]
        n = min(len(first), len(second))
        if sum(map(len, first[:n])) < 2:
            continue
        if first[:n] != second[:n]:
            return [Finding("order", OK, "the second epoch has another order, on {}", where=str(ranks))]
        evidence = f"the second epoch has the order of the first on {count(ranks, 'rank')}, in its {n} first batches"
        if loader["spread"]:
            return [Finding("order", FAILED, evidence, f"{loader['sampler']} does not know the epoch",
                            "call sampler.set_epoch(epoch) at the start of each epoch")]  # fmt: skip
        return [Finding("order", FAILED, evidence, "the sampler's generator is seeded in each epoch", "seed it once")]
    return []


# --- random numbers


def compare_draws(told: Sequence[Sequence[Sequence[Any]]]) -> Finding:
    """`told`: for each rank its forward passes: (state of the streams, the layers that drew)."""
    layers = list(dict.fromkeys(layer for rank in told for _, drew in rank for layer in drew))
    if not layers:
        return Finding("random", OK, "no layer draws random numbers")
    named = f"layer{'s' * (len(layers) > 1)} {listed(layers, 3)}"
    for number in range(max(map(len, told))):
        seen: dict[str, int] = {}
        for rank, passes in enumerate(told):
            if number >= len(passes) or not passes[number][1]:
                continue
            if (other := seen.setdefault(passes[number][0], rank)) != rank:
                return Finding(
                    "random", FAILED,
                    f"ranks {other} and {rank} draw the same numbers in forward pass {number + 1}, in {named}",
                    "all ranks still use the same seed after the model is created",
                    "then seed again: rankwise.seed_rank(seed, rank), or torch.manual_seed(seed + rank)",
                )  # fmt: skip
    for rank, passes in enumerate(told):
        drew = [at for at, drew_then in passes if drew_then]
        if len(drew) > 1 and len(set(drew)) == 1:
            return Finding(
                "random", FAILED, f"rank {rank} draws the same numbers in each step, in {named}",
                "the script seeds in each step", "seed once, before the loop",
            )  # fmt: skip
    return Finding("random", OK, f"on {{}} each rank draws its own numbers, in {named}", where=str(len(told)))


# --- gradients and steps


def _between_ranks(records: Sequence[Record], gradients: Gradients) -> list[Finding]:
    """The optimizer must get the same gradient on every rank. No finding if it does."""
    ranks = len(records)
    stepped = _stepped(records)
    apart = first_apart([records[rank]["steps"][0]["gradients"] for rank in stepped], [f"rank {r}" for r in stepped])
    if apart is None:
        return []
    found = {rank: gradients(ranks, rank) for rank in stepped}
    far = max((difference(found[stepped[0]], found[rank]) for rank in stepped), key=lambda d: d.size)
    if far.size <= TOLERANCES["float64"]:
        return []
    evidence = f"on {count(ranks, 'rank')} the optimizer gets different gradients: they differ by {far}"
    if any(record["bypassed"] for record in records):
        cause = "the forward pass calls model.module and not DistributedDataParallel, so nothing reduces the gradients"
        return [Finding("gradients", FAILED, evidence, cause, "call the wrapped model: model(x)")]
    if not any(record["wrapped"] for record in records):
        return [Finding("gradients", FAILED, evidence, "nothing reduces the gradients over the ranks",
                        "DistributedDataParallel(model), or rankwise.AllReduce: attach, backward, step")]  # fmt: skip
    return [Finding("gradients", FAILED, evidence, "gradients are changed after they were reduced, or DDP stays in no_sync()",
                    "clip and change them the same way on all ranks; end no_sync() before the last micro-batch")]  # fmt: skip


def _stepped(records: Sequence[Record]) -> list[int]:
    """The ranks that have taken a step."""
    return [rank for rank, record in enumerate(records) if record["taken"]]


def _between_starts(starts: Starts, gradients: Gradients) -> Finding:
    """The gradient of the first step on each number of ranks, from the same weights and samples, without random numbers."""
    low = min(starts)
    first = starts[low][_stepped(starts[low])[0]]
    drawing = sorted({layer for records in starts.values() for _, drew in records[0]["still"] for layer in drew})
    if drawing:
        return Finding("gradients", OPEN, f"{', '.join(drawing)} draws random numbers although torch's dropout is switched off",
                       "two forward passes give different results", "switch it off (self.training) and test again")  # fmt: skip
    reference, tolerance = gradients(low, first["rank"]), TOLERANCES.get(first["dtype"], 1e-3)
    if not reference:
        return Finding("gradients", OPEN, "the optimizer had no gradients when its first step began",
                       "it computes them itself, in a closure (LBFGS)")  # fmt: skip
    apart, factors = {}, {}
    for ranks, records in starts.items():
        if ranks == low:
            continue
        if (problem := _not_comparable(starts[low], records)) is not None:
            return problem
        mine = records[_stepped(records)[0]]
        apart[ranks] = difference(reference, gradients(ranks, mine["rank"]))
        factors[ranks] = factor(reference, gradients(ranks, mine["rank"]))
    if not apart:
        return Finding("gradients", OPEN, "tested on only one number of ranks: there is nothing to compare with")
    figures = ", ".join(f"{count(ranks, 'rank')}: {far}" for ranks, far in apart.items())
    evidence = f"those on {count(low, 'rank')}: {figures}; relative, in {first['dtype']}, {tolerance:g} is allowed"
    if all(far.size <= tolerance for far in apart.values()):
        return _equal(f"equal to {evidence}", first["norms"])
    if all(factors.values()):
        told = ", ".join(f"{c:.3g} on {ranks}" for ranks, c in factors.items())
        return Finding(
            "gradients", KNOWN, f"the same except for a factor: {told}; in {first['dtype']}",
            "the loss is a sum, or is divided by a fixed number: its gradient shrinks with the number of ranks",
            "none if the global batch grows with the ranks and the learning rate is chosen for that",
        )  # fmt: skip
    if any(record["drew"] for records in starts.values() for record in records):
        return Finding(
            "gradients", OPEN, f"differ from {evidence}",
            "the script draws random numbers for a step (noise, time steps, mixup), which differ between ranks",
            "to compare the gradients, replace these numbers by constants in this test",
        )  # fmt: skip
    if not _first_samples(starts[low]):
        return Finding(
            "gradients", OPEN, f"differ from {evidence}", "each rank may make other batches: none was seen",
            "to compare them, use a loader with the same sampler and seed on any number of ranks",
        )  # fmt: skip
    return Finding(
        "gradients", FAILED, f"differ from {evidence}",
        "each rank's loss is a mean over another count (tokens, frames, valid targets), and these means are averaged (a mean "
        "of means); or a layer mixes the samples of a batch",
        "divide the sum by the count of all ranks, as sync.backward(loss_sum, count) of rankwise.AllReduce does",
    )  # fmt: skip


def _not_comparable(first: Sequence[Record], records: Sequence[Record]) -> Finding | None:
    """Why the gradients of two numbers of ranks may differ without a mistake in how they are computed."""
    low, here = len(first), count(len(records), "rank")
    if _first_samples(records) != _first_samples(first):
        return Finding(
            "gradients", OPEN, f"the first step has other samples on {here} than on {low}: not comparable",
            "the order of the data depends on the number of ranks, or each rank draws its own batches",
            "to compare them, use a loader with the same sampler and seed on any number of ranks",
        )  # fmt: skip
    if records[_stepped(records)[0]]["start"] != first[_stepped(first)[0]]["start"]:
        return Finding(
            "gradients", OPEN, f"the model starts with other weights on {here} than on {low}: not comparable",
            "its seed depends on the time or the number of ranks", "torch.manual_seed(seed) before the model is created",
        )  # fmt: skip
    if (sample := _other_content([*first, *records])) is not None:
        return Finding(
            "gradients", OPEN, f"sample {sample} differs between starts or ranks: not comparable",
            "the dataset is random (augmentation), or each rank creates its own dataset",
            "if the data itself is drawn or shuffled, use one seed on all ranks; augmentation may differ",
        )  # fmt: skip
    return None


def _equal(evidence: str, norms: Sequence[str]) -> Finding:
    if not norms:
        return Finding("gradients", OK, evidence)
    return Finding(
        "gradients", KNOWN, f"{evidence}, with BatchNorm in evaluation mode",
        f"BatchNorm {', '.join(map(repr, norms[:3]))} takes its statistics from a rank's own micro-batch",
        "none if this is intended; otherwise GroupNorm, LayerNorm, or torch.nn.SyncBatchNorm.convert_sync_batchnorm on GPUs",
    )  # fmt: skip


def _other_content(records: Sequence[Record]) -> str | None:
    """The first sample whose content differs between ranks or starts."""
    known: dict[str, str] = {}
    for record in records:
        for sample, content in record["contents"].items():
            if known.setdefault(sample, content) != content:
                return str(sample)
    return None


def _first_samples(records: Sequence[Record]) -> Counter[Any]:
    """The samples that all ranks together have used before any rank took its first step."""
    passes = records[_stepped(records)[0]]["steps"][0]["forwards"]
    return Counter(_key(sample) for record in records for batch in record["batches"][:passes] for sample in batch)


def _steps(records: Sequence[Record]) -> Finding:
    here = count(len(records), "rank")
    passes = min(record["forwards"] for record in records)
    counts = [sum(step["forwards"] <= passes for step in record["steps"]) for record in records]
    if len(set(counts)) > 1:
        told = ", ".join(f"rank {rank} took {count}" for rank, count in enumerate(counts))
        return Finding(
            "steps", FAILED, f"of the first {max(counts)} optimizer steps, {told}",
            "the optimizer steps only on some ranks", "step on every rank; write and print only on rank 0",
        )  # fmt: skip
    for number in range(counts[0]):
        apart = first_apart([record["steps"][number].get("parameters", {}) for record in records])
        if apart is not None:
            return Finding(
                "steps", FAILED, f"on {here} after step {number + 1}: {apart}", "the ranks no longer have the same model",
                "every rank must step, with the same gradient and optimizer settings",
            )  # fmt: skip
    return Finding("steps", OK, f"after {counts[0]} the parameters are the same on {{}}", where=str(len(records)))
