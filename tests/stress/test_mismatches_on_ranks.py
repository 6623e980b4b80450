"""Each collective with each way in which one of three real ranks can ask something else: it is reported with its line."""

from __future__ import annotations

import pytest
from launched import launch

__all__ = ["launch"]  # a fixture

pytestmark = pytest.mark.stress

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
different = "DIFFERENT" if rank == 1 else ""
x = torch.ones(8 if different == "shape" else 4, dtype=torch.int32 if different == "dtype" else torch.float32)
xs = [x.clone() for _ in range(n)]
op = dist.ReduceOp.MAX if different == "operation" else dist.ReduceOp.SUM
root = 2 if different == "root" else 0
def one(): CALL
def other(): dist.all_reduce(torch.ones(3), dist.ReduceOp.MIN)
for _ in range(3): dist.all_reduce(torch.ones(4))
if different == "order": other(); one()
elif different == "absent": other()
else: one(); other()
dist.barrier()
"""
CALLS = {
    "all_reduce": "dist.all_reduce(x, op)",
    "broadcast": "dist.broadcast(x, src=root)",
    "reduce": "dist.reduce(x, root, op)",
    "all_gather": "dist.all_gather(xs, x)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(torch.cat(xs), x)",
    "reduce_scatter": "dist.reduce_scatter(x, xs, op)",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(x, torch.cat(xs), op)",
    "gather": "dist.gather(x, xs if rank == root else None, dst=root)",
    "scatter": "dist.scatter(x, xs if rank == root else None, src=root)",
    "all_to_all_single": "dist.all_to_all_single(torch.cat(xs), torch.cat(xs))",
    "barrier": "dist.barrier()",
    "all_gather_object": "dist.all_gather_object([None] * n, rank)",
    "broadcast_object_list": "dist.broadcast_object_list([rank], src=root)",
    "gather_object": "dist.gather_object(rank, [None] * n if rank == root else None, dst=root)",
    "scatter_object_list": "dist.scatter_object_list([None], [1] * n if rank == root else None, src=root)",
}
WHAT = ("operation", "dtype", "shape", "root", "order", "absent")


def applies(call: str, different: str) -> bool:
    needed = {"operation": "op", "dtype": "x", "shape": "x", "root": "root"}.get(different, "")
    return needed in call.replace("dist.", "") and not (different == "shape" and "all_to_all" in call)


CASES = [(name, different) for name, call in CALLS.items() for different in WHAT if applies(call, different)]
_ONE_IN = 5  # in the small dose; tests/agent/test_collective_notes.py has all of them, without ranks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize(("name", "different"), CASES[:: _ONE_IN if metafunc.config.getoption("dose") == "small" else 1])


def test_the_rank_that_asks_something_else_is_named(launch, name: str, different: str) -> None:
    script = SCRIPT.replace("DIFFERENT", different).replace("CALL", CALLS[name])
    run = launch(script, options=("--nproc", "3", "--check-collectives"))
    assert run.wait() == 1
    said = f"the ranks do not match in collective 4: rank 1 calls {'all_reduce' if different in WHAT[4:] else name}("
    assert said in run.output()
    assert f", but ranks 0, 2 call {name}(" in run.output()
