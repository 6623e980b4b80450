"""Scripts with DDP whose ranks would train on the same samples, or in the same order in every epoch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rankwise.launch.ddp_lint import pitfalls_of_ddp
from rankwise.launch.script_lint import examine

DDP = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
def setup(rank, world_size):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])
setup(rank, world_size)
model = DDP(torch.nn.Linear(2, 2).to(local_rank), device_ids=[local_rank])
loader = DataLoader(data, batch_size=args.batch_size // world_size, shuffle=True)
for epoch in range(9):
    for x, y in loader: ...
    if rank == 0:
        print(f"epoch {epoch} of {world_size} ranks", x[::2])
        torch.save(model.module.state_dict(), f"epoch-{epoch}.pt")
"""
SAMPLED = DDP.replace("loader = DataLoader(data,", "sampler = DistributedSampler(data)\nloader = DataLoader(data,")


_OF_DDP = "model = DDP(torch.nn.Linear(2, 2).to(local_rank), device_ids=[local_rank])"
FSDP = DDP.replace("nn.parallel import DistributedDataParallel as DDP", "distributed.fsdp import fully_shard").replace(
    _OF_DDP,
    "model = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh('cuda', (world_size,)), reshard_after_forward=False)",
)
OLDER_FSDP = FSDP.replace("import fully_shard", "import FullyShardedDataParallel as FSDP, ShardingStrategy").replace(
    "fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh('cuda', (world_size,)), reshard_after_forward=False)",
    "FSDP(torch.nn.Linear(2, 2), sharding_strategy=ShardingStrategy.FULL_SHARD, device_id=local_rank)",
)


def found(source: str) -> list[str]:
    return pitfalls_of_ddp(ast.parse(source))


WITHOUT = (
    "line 12 creates a DataLoader without a sampler, so every rank reads all samples: pass "
    "sampler=DistributedSampler(dataset{}, unless the dataset divides its samples by rank"
)


@pytest.mark.parametrize(
    ("source", "instead"),
    [
        (DDP, " instead of shuffle"),
        (FSDP, " instead of shuffle"),
        (OLDER_FSDP, " instead of shuffle"),
        (DDP.replace("Parallel as DDP", "Parallel").replace("DDP(", "DistributedDataParallel("), " instead of shuffle"),
        (DDP.replace("= DDP(", "= torch.nn.parallel.DistributedDataParallel("), " instead of shuffle"),
        (DDP.replace("= DataLoader(", "= torch.utils.data.DataLoader("), " instead of shuffle"),
        (DDP.replace(", shuffle=True", ""), ""),
        (DDP.replace("data, batch_size=args.batch_size // world_size, shuffle=True", "data, 64, True"), " instead of shuffle"),
        (DDP.replace("shuffle=True", "shuffle=False"), ", shuffle=False) instead of shuffle"),
        (DDP.replace(", shuffle=True", "") + "other = DataLoader(more, shuffle=True)\n", ""),
        (DDP + "random.seed(local_rank)\ndevice = rank % torch.cuda.device_count()\n", " instead of shuffle"),
        (DDP.replace(", shuffle=True", ", drop_last=True, collate_fn=collate"), ""),
        (DDP.replace("DataLoader(data,", "DataLoader(random_split(data, [90, 10])[0],"), " instead of shuffle"),
        (DDP + "val_loader = DataLoader(held_out)\n", " instead of shuffle"),
        (DDP.replace("import DataLoader", "import DataLoader, DistributedSampler"), " instead of shuffle"),
        (DDP + "optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * world_size)\n", " instead of shuffle"),
    ],
)
def test_a_training_loader_without_a_sampler_is_named_with_its_line(source: str, instead: str) -> None:
    assert found(source) == [WITHOUT.format(instead if ")" in instead else f"){instead}")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("shuffle=True", "sampler=mine"),
        ("shuffle=True", "batch_sampler=mine"),
        ("shuffle=True", "**options"),
        ("DataLoader(data, batch_size=args.batch_size // world_size, shuffle=True)", "DataLoader(data, 8, False, mine)"),
        ("DataLoader(data,", "DataLoader(data[rank::world_size],"),
        ("DataLoader(data,", "DataLoader(data[r::n],"),
        ("DataLoader(data,", "DataLoader(data[rank],"),
        ("DataLoader(data,", "DataLoader(data.shard(8, 1),"),
        ("DataLoader(data,", "DataLoader(Data(path, rank=rank),"),
        ("DataLoader(data,", "DataLoader(data.select(range(rank, n, world_size)),"),
        ("DataLoader(data,", "DataLoader(np.array_split(data, world_size)[0],"),
        ("DataLoader(data,", 'DataLoader(torch.load(f"part-{rank}.pt"),'),
        ("DataLoader(data,", "DataLoader(StreamingDataset(path),"),
        ("DataLoader(data,", "DataLoader(split_dataset_by_node(data, a, b),"),
        ("loader = DataLoader(data,", "first = rank * len(data) // n\nloader = DataLoader(data[first:],"),
        ("loader = DataLoader(", "samplers = [DistributedSampler]\nloader = DataLoader("),
        ("loader = DataLoader(", "class Mine(IterableDataset): ...\nloader = DataLoader("),
        ("loader = DataLoader(", "from streaming import StreamingDataset as Data\nloader = DataLoader(Data(1)) or DataLoader("),
        ("    for x, y", "    loader = accelerator.prepare(loader)\n    for x, y"),
        ("loader = DataLoader(", "other = rankwise.Loader(more)\nloader = DataLoader("),
        ("loader = DataLoader(data,", 'path = f"part-{rank}.npy"\nloader = DataLoader(np.load(path),'),
        ("loader = DataLoader(data,", 'path = "part-{}.npy".format(rank)\nloader = DataLoader(np.load(path),'),
        ("loader = DataLoader(data,", "path = root + str(rank)\nloader = DataLoader(np.load(path),"),
        ("DataLoader(data,", 'DataLoader(files[int(os.environ["RANK"])],'),
        ("DataLoader(data,", "DataLoader(data[rank * batch_size : (rank + 1) * batch_size],"),
        ("DataLoader(data, batch_size=args.batch_size // world_size, shuffle=True)", "DataLoader(*given)"),
        ("DataLoader(data,", "DataLoader(load(rank),"),
        ("DataLoader(data,", "DataLoader(wds.WebDataset(data),"),
        ("loader = DataLoader(", "val_loader = DataLoader("),
        ("    for x, y in loader: ...", "    for i, x in enumerate(loader):\n        if i % world_size != rank: continue"),
        ("def setup(", "def windows(text):\n    yield from text\ndef setup("),
        ("= DDP(", "= id("),
    ],
)
def test_a_script_that_may_divide_its_data_gets_no_warning(before: str, after: str) -> None:
    assert before in DDP
    assert found(DDP.replace(before, after)) == []


@pytest.mark.parametrize("source", [FSDP, OLDER_FSDP])
def test_neither_does_a_divided_model_whose_ranks_may_need_the_same_samples_or_divide_their_data(source: str) -> None:
    assert found(source.replace("loader = DataLoader(", "parallelize_module(model, mesh, plan)\nloader = DataLoader(")) == []
    assert found(source.replace("DataLoader(data,", "DataLoader(data.shard(8, 1),")) == []
    assert found(source.replace("shuffle=True", "sampler=mine")) == []


UNSET = (
    "line 12 creates a DistributedSampler, and no line calls its set_epoch, so every epoch has the same order: call "
    "sampler.set_epoch(epoch) at the start of each epoch"
)


@pytest.mark.parametrize("given", ["data", "data, shuffle=True", "data, world_size, rank", "data, world_size, rank, True"])
def test_a_sampler_whose_epoch_is_never_set_is_named_with_its_line(given: str) -> None:
    assert pitfalls_of_ddp(ast.parse(SAMPLED.replace("DistributedSampler(data)", f"DistributedSampler({given})"))) == [UNSET]


@pytest.mark.parametrize(
    "loop",
    ["ep in range(9)", "e in trange(9)", "_ in range(args.epochs)", "epoch in range(num_epochs)", "i in range(1, N_EPOCHS + 1)",
     "epoch in tqdm(range(9))"],
)  # fmt: skip
def test_a_loop_over_epochs_is_recognized(loop: str) -> None:
    assert found(SAMPLED.replace("epoch in range(9)", loop)) == [UNSET]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    for x, y", "    sampler.set_epoch(epoch)\n    for x, y"),
        ("for epoch in", "hooks = [sampler.set_epoch]\nfor epoch in"),
        ("    for x, y", "    train_one_epoch(model, loader, epoch)\n    for x, y"),
        ("sampler = DistributedSampler(data)", "val_sampler = DistributedSampler(data)"),
        ("DistributedSampler(data)", "DistributedSampler(*given)"),
        ("    for x, y", "    loader.sampler.set_epoch(epoch)\n    for x, y"),
        ("DistributedSampler(data)", "DistributedSampler(data, shuffle=False)"),
        ("DistributedSampler(data)", "DistributedSampler(data, world_size, rank, False)"),
        ("DistributedSampler(data)", "DistributedSampler(data, shuffle=args.shuffle)"),
        ("DistributedSampler(data)", "DistributedSampler(data, **options)"),
        ("for epoch in range(9)", "for part in range(9)"),
        ("for epoch in range(9)", "for e in events"),
        ("for epoch in range(9):", "for ep in range(9):\n    train(loader, ep)"),
        ("for epoch in range(9):", "for i in range(epochs):\n    train(loader, i)"),
    ],
)
def test_a_sampler_that_gets_its_epoch_or_keeps_the_order_gets_no_warning(before: str, after: str) -> None:
    assert before in SAMPLED
    assert found(SAMPLED.replace(before, after)) == []


def test_the_examples_get_no_warning() -> None:
    scripts = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
    assert len(scripts) > 5
    assert {script.name: examine(str(script)).pitfalls for script in scripts} == dict.fromkeys([s.name for s in scripts], ())


def test_the_launcher_warns_before_several_ranks_start_and_not_of_one(rankwise) -> None:
    Path("train.py").write_text(f"if 0:{DDP}".replace("\n", "\n    "))
    warned = rankwise("run", "--nproc", "2", "train.py")
    assert warned.returncode == 0, warned.stderr
    assert "rankwise: warning: train.py, line 12 creates a DataLoader without a sampler" in warned.stderr
    assert "warning" not in rankwise("run", "--nproc", "1", "train.py").stderr
