"""On a real GPU, in processes of their own: training is what a plain loop computes there, a save and a resume change nothing,
and what fails there is named.

    python -m pytest -m gpu
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launched import launch, wait_for
from ranks import on_ranks, torchrun
from test_docs import EXAMPLES, PYTHON
from test_examples_on_a_gpu import SHOWN, WORDS
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import rankwise as rw

__all__ = ["launch"]  # a fixture

pytestmark = pytest.mark.gpu

SETUP = """
import os, sys, time, pathlib, signal, torch, rankwise as rw
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
data = TensorDataset(torch.randn(200, 16), torch.randint(4, (200,)))
def made():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 4))
def step(model, batch):
    x, y = batch
    assert x.is_cuda and y.is_cuda
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)
def weights(model):
    values = torch.cat([t.detach().float().flatten() for t in model.state_dict().values()]).tolist()
    return [round(value, 6) for value in values]
"""

ONE = ("--nproc", "1", "--start-method", "spawn")


def said(run) -> str:
    status = run.wait()
    text = run.output()
    assert status == 0, text
    return text


def test_without_nproc_there_is_one_rank_per_gpu_and_each_has_its_own(launch) -> None:
    run = launch("import rankwise\nprint('here is', rankwise.local_device(rankwise.init()))", options=())
    assert "here is cuda:0\n" in said(run)
    assert re.search(r"rankwise: .*script.py on \d+ ranks? \(one per GPU\), \d+ threads each, in", run.output()), run.output()


def test_ranks_that_share_a_gpu_are_warned_of_and_what_nccl_says_is_named(launch) -> None:
    source = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(1, device="cuda:0"))
"""
    run = launch(source, options=("--nproc", "2", "--gpus", "0"))
    assert run.wait() != 0
    text = run.output()
    assert re.search(r"warning: \d+ ranks share \d+ GPUs?; NCCL refuses that", text), text
    assert re.search(r"rankwise: .*(Duplicate GPU detected|NCCL error)", text), text


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_trainer_computes_what_a_plain_loop_computes(launch, precision: str) -> None:
    """The plain loop has the same batches and the same dropout."""
    source = SETUP + (
        f"precision = {precision!r}\n"
        """
seen = []
def recorded(model, batch):
    seen.append((batch[0].clone(), batch[1].clone(), torch.cuda.get_rng_state()))
    return step(model, batch)
model = made()
trainer = rw.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), recorded, data, global_batch_size=32,
                     max_steps=30, precision=rw.Precision(precision, loss_scale=2.0**10), clip_norm=0.5, sync=rw.AllReduce())
trainer.fit()
plain = made().cuda().train()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
tolerance = 1e-4 if precision == "fp32" else 1e-2
dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
for x, y, state in seen[-30:]:  # not the Trainer's check of the loss before the first step
    torch.cuda.set_rng_state(state)
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        loss = F.cross_entropy(plain(x), y, reduction="sum")
    (loss * 2.0**10 / 32).backward()
    for p in plain.parameters():
        p.grad.mul_(32 / 2.0**10 / len(y))
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
for (name, a), (_, b) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
print("the same")
"""
    )
    assert "the same\n" in said(launch(source, options=ONE))


def test_steps_of_the_trainer_do_not_wait_for_the_gpu(launch) -> None:
    source = (
        SETUP
        + """
torch.use_deterministic_algorithms(False)
model = made()
modes = []
def watched(model, batch):
    if trainer.state.step in (5, 40):
        torch.cuda.set_sync_debug_mode("error" if trainer.state.step == 5 else "default")
    modes.append(torch.cuda.get_sync_debug_mode())
    return step(model, batch)
trainer = rw.Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), watched, data, global_batch_size=4, max_steps=45,
                     clip_norm=0.5, actions=[rw.actions.Log(100), rw.actions.every(lambda state: None, steps=1000)])
trainer.fit()
print("without a wait:", modes.count(2), "steps")
"""
    )
    assert "without a wait: 35 steps\n" in said(launch(source, options=ONE))


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_step_that_is_judged_on_the_gpu_does_what_one_does_that_the_cpu_waits_for(launch, kind: str) -> None:
    """Some samples give gradients that are not finite: their steps are skipped."""
    source = SETUP + (
        f"kind = {kind!r}\n"
        """
from rankwise.sync import late
data.tensors[0][7], data.tensors[0][150] = float("nan"), float("inf")
def trained(name, possible):
    model = made()
    del model[2:4]
    late.is_possible, before = (late.is_possible if possible else lambda _: False), late.is_possible
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05)
    trainer = rw.Trainer(model, optimizer, step, data, global_batch_size=10, max_steps=50, run_dir=name,
                         scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9))
    assert (trainer.sync._late is not None) == possible
    trainer.fit()
    late.is_possible = before
    return [p.detach().clone() for p in model.parameters()], trainer.state.steps_left_out, optimizer.param_groups[0]["lr"]
one, other = trained("late", True), trained("waits", False)
assert one[1:] == other[1:] and one[1] == 4, (one[1:], other[1:])
assert all(map(torch.equal, one[0], other[0]))
print("the same")
"""
    )
    assert "the same\n" in said(launch(source, options=ONE))


@pytest.mark.parametrize("way", ["compile", "cuda graphs", "bf16 weights", "channels last", "pinned"])
def test_the_trainer_computes_the_same_with_what_gpus_are_used_with(launch, way: str) -> None:
    """After 20 steps without dropout, the loss is that of the plain way (of the same weights in bf16)."""
    source = SETUP + (
        f"way = {way!r}\n"
        """
data = TensorDataset(torch.randn(200, 3, 8, 8), torch.randint(4, (200,)))
def trained(way):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 4))
    if "bf16" in way:
        model.bfloat16()
    if way == "channels last":
        model.to(memory_format=torch.channels_last)
    model.cuda()
    mode = {"compile": "default", "cuda graphs": "reduce-overhead"}.get(way)
    called = torch.compile(model, mode=mode) if mode else model
    losses = []
    def step(_, batch):
        x, y = batch
        if way == "channels last":
            x = x.contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(called(x.to(next(model.parameters()).dtype)).float(), y, reduction="sum")
        losses.append(loss.detach().clone())
        return loss, len(y)
    loader = rw.Loader(data, global_batch_size=32, accumulate=2, max_epochs=9, drop_last=True, pin_memory=way == "pinned")
    trainer = rw.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), step, loader, max_steps=20,
                         checkpoints=rw.Checkpoints(way.replace(" ", "-"), every_steps=6))
    trainer.fit()
    return torch.stack(losses[-40:])
plain = trained("plain bf16" if way == "bf16 weights" else "plain")
torch.testing.assert_close(trained(way), plain, rtol=1e-3, atol=1e-3)
assert plain[-1] < plain[0] - 1, plain
print("the same")
"""
    )
    assert "the same\n" in said(launch(source, options=ONE))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_killed_run_continues_bit_for_bit(launch, tmp_path: Path, precision: str) -> None:
    source = SETUP + (
        f"precision = {precision!r}\n"
        """
def at_13(state):
    if state.step == 13 and sys.argv[1] == "kill" and not os.path.exists("killed"):
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
model = made()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
trainer = rw.Trainer(model, optimizer, step, data, batch_size=16, accumulate=2, max_steps=30, precision=precision,
                     checkpoints=rw.Checkpoints(every_steps=5), actions=[at_13],
                     scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30))
trainer.fit()
print("weights", weights(model))
"""
    )
    found = []
    for way in ("plain", "kill"):
        text = said(launch(source, way, options=(*ONE, "--max-restarts", "1", "--name", way)))
        assert Path("killed").exists() == (way == "kill")
        found.append(re.findall(r"^weights .*", text, re.M)[-1])
    assert found[0] == found[1]


def test_a_save_in_the_background_has_the_state_of_its_step(launch) -> None:
    """The loop changes the weights while they are copied and written: 64 million values, one step after the other."""
    source = SETUP + (
        """
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))
data = TensorDataset(torch.randn(64, 2048))
def step(model, batch):
    return model(batch[0]).square().sum(), len(batch[0])
kept = {}
def keep(state):
    kept[state.step] = [p.detach().clone() for p in state.model.parameters()]
trainer = rw.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-4), step, data, batch_size=8, max_steps=12,
                     checkpoints=rw.Checkpoints(every_steps=3, keep_last=9), actions=[keep])
trainer.fit()
for number in (3, 6, 9, 12):
    there = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))
    [folder] = pathlib.Path(trainer.run_dir, "checkpoints").glob(f"step-*{number:06}")
    there.load_state_dict(torch.load(folder / "model.pt"))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(there.parameters(), kept[number], strict=True)), number
print("all equal")
"""
    )
    assert "all equal\n" in said(launch(source, options=ONE))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.empty(1 << 44, device='cuda')", r"rank 0 raised OutOfMemoryError: CUDA out of memory"),
        (
            "nn.Embedding(4, 4).cuda()(torch.tensor([9]).cuda()).sum().item()",
            r"rank 0 raised (AcceleratorError|RuntimeError): CUDA error: device-side assert triggered",
        ),
        ("torch.ones(2, device='cuda:7')", r"rank 0 raised .*invalid device ordinal"),
    ],
)
def test_what_fails_on_the_gpu_is_named(launch, source: str, expected: str) -> None:
    run = launch(f"import torch\nfrom torch import nn\nx = torch.ones(3, device='cuda')\n{source}", options=ONE)
    assert run.wait() == 1
    assert re.search(expected, run.output()), run.output()
    assert "(script.py:4)" in run.output(), run.output()


def test_a_stop_while_the_gpu_computes_saves_and_the_same_command_continues(launch) -> None:
    source = SETUP + (
        """
model = made()
def slow(model, batch):
    torch.cuda._sleep(100_000_000)  # some 50 ms of the GPU
    return step(model, batch)
trainer = rw.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), slow, data, batch_size=16, max_steps=60)
print("ended at", trainer.fit().step)
"""
    )
    run = launch(source, options=ONE)
    wait_for(lambda: run.steps() > 0 or run.process.poll() is not None, "steps", run.output)
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert "saved" in run.output(), run.output()
    assert "ended at 60" not in run.output()
    assert "ended at 60\n" in said(launch(source, options=ONE))


LEFT = {
    "a graph": """
graph, pool = torch.cuda.CUDAGraph(), torch.zeros(9, device="cuda")
with torch.cuda.graph(graph):
    pool += 1
""",
    "queued kernels": """
large = torch.randn(8192, 8192, device="cuda")
for _ in range(200):
    last = large @ large
""",
    "a collective of NCCL": """
torch.distributed.init_process_group("nccl")
work = torch.distributed.all_reduce(torch.ones(9, device="cuda"), async_op=True)
""",
    "a reader with pinned memory": """
read = iter(torch.utils.data.DataLoader(torch.ones(99, 9), num_workers=1, pin_memory=True))
next(read)
""",
    "a profiler": """
profiler = torch.profiler.profile()
profiler.__enter__()
torch.ones(9, device="cuda")
""",
}


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_open_file_is_complete_whatever_the_script_leaves_on_the_gpu(launch, tmp_path: Path, method: str, left: str) -> None:
    source = f"import torch\nfile = open('result.txt', 'w')\nfile.write('all of it')\n{LEFT[left]}"
    said(launch(source, options=("--nproc", "1", "--start-method", method)))
    assert [file.read_text() for file in tmp_path.rglob("result.txt")] == ["all of it"]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_on_the_gpu_have_the_values_of_the_dataset(launch, workers: int) -> None:
    """Pinned memory, and the ring of the workers, are used again while earlier copies may be under way."""
    source = SETUP + (
        f"workers = {workers}\n"
        """
class Numbered:
    def __len__(self): return 4096
    def __getitems__(self, indices):
        numbers = torch.tensor(indices)
        return numbers, numbers[:, None].float().expand(-1, 4096).contiguous()
world = rw.init()
rw.local_device(world)
loader = rw.Loader(Numbered(), batch_size=64, num_workers=workers, max_epochs=2)
seen = []
for micro_batches in loader:
    for numbers, rows in micro_batches:
        assert rows.is_cuda
        torch.cuda._sleep(2_000_000)
        seen.append((numbers, (rows - numbers[:, None]).abs().max()))
assert max(float(error) for _, error in seen) == 0
assert sorted(torch.cat([n for n, _ in seen]).tolist()) == sorted([*range(4096)] * 2)
print("the same")
"""
    )
    assert "the same\n" in said(launch(source, options=ONE))


@pytest.mark.parametrize("name", SHOWN)
def test_every_example_and_all_python_of_the_documentation_runs_here(name: str) -> None:
    Path("shown.py").write_text(SHOWN[name])
    command = [sys.executable, "-m", "rankwise", "run", "shown.py", *WORDS.get(name, ())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_shown_are_all_that_there_are() -> None:
    assert set(EXAMPLES) < set(SHOWN)
    assert len(SHOWN) > len(PYTHON)


def _trained(world_size: int, sync: str, precision: str) -> list[float]:
    """The weights after 12 steps; several ranks use one GPU, so gloo sends their gradients."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(50, 8), torch.randint(3, (50,)))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    way = rw.Precision(precision)
    strategy = {"together": rw.AllReduce, "overlap": lambda: rw.AllReduce(overlap=True), "local": lambda: rw.LocalSGD(every=3)}
    used = strategy[sync]().attach(model, optimizer, loss_scale=way.new_loss_scale())
    loader = rw.Loader(data, global_batch_size=16, max_epochs=3)
    for micro_batches in loader:
        for x, y in micro_batches:
            with way.autocast():
                loss = F.cross_entropy(model(x.cuda()), y.cuda(), reduction="sum")
            used.backward(loss, len(y))
        used.step()
    with used.averaged():
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sync", ["together", "overlap", "local"])
def test_two_ranks_on_one_gpu_train_what_one_trains(monkeypatch, sync: str, precision: str) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    environ = [{**torchrun(rank, 2, 2), "CUDA_VISIBLE_DEVICES": "0"} for rank in range(2)]
    two = on_ranks(2, _trained, 2, sync, precision, environ=environ, init={"backend": "gloo"})
    assert two[0] == two[1]
    if sync == "local":
        return
    [one] = on_ranks(1, _trained, 1, "together", precision, environ=[{"CUDA_VISIBLE_DEVICES": "0"}])
    tolerance = {"fp32": 1e-5, "bf16": 2e-2}[precision]
    torch.testing.assert_close(torch.tensor(two[0]), torch.tensor(one), rtol=tolerance, atol=tolerance)
