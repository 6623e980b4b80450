"""What a Trainer's ranks do after the same step without a message per step: triggers by time, a stop by the script, rates."""

from __future__ import annotations

import contextlib
import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks, torchrun
from torch import nn
from torch.utils.data import TensorDataset
from trainers import trainer_of

import rankwise
from rankwise import TrainState
from rankwise.actions import EarlyStopping, Log, Plateau
from rankwise.dist import comm
from rankwise.errors import ConfigError
from rankwise.run.directory import RunDir
from rankwise.stop import coordinator

RUN = Path("run")


def fit(pause_s: float = 0.0, **arguments: Any) -> TrainState:
    return new_trainer(pause_s, **arguments).fit()


def new_trainer(pause_s: float = 0.0, **arguments: Any) -> rankwise.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)

    def step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        if torch.is_grad_enabled():
            time.sleep(pause_s)
        return model(batch[0]).square().sum(), len(batch[0])

    data = TensorDataset(torch.randn(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    arguments = {"global_batch_size": 8, "max_steps": 40, "log_every": 1000, "run_dir": RUN, **arguments}
    return trainer_of(model, optimizer, step, data, **arguments)


def steps_by_time(pause_s: float) -> tuple[list[int], int]:
    """(the steps after which a timed action ran, the last step). The run ends when the action has run three times."""
    ran: list[int] = []

    def note(state: TrainState) -> None:
        ran.append(state.step)
        if len(ran) == 3:
            state.stop()

    state = fit(pause_s, max_steps=100_000, actions=[rankwise.every(note, seconds=0.2)])
    return ran, state.step


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), (2, 1)], ids=["alone", "one node", "two nodes"])
def test_an_action_by_time_runs_between_log_intervals_and_after_the_same_steps_on_all_ranks(ranks: int, per_node: int) -> None:
    environ = [torchrun(r, ranks, per_node) for r in range(ranks)] if ranks > 1 else None
    first, *others = on_ranks(ranks, steps_by_time, 0.05, environ=environ)
    assert others == [first] * (ranks - 1)
    ran, last = first
    assert len(set(ran)) == 3
    assert last in (ran[-1], ran[-1] + 1)  # the request is seen at the gate of the next step


def saved_by_time() -> list[str]:
    fit(0.05, max_steps=30, every_s=0.3, keep_last=100)
    return RunDir(RUN).saved()


def test_a_training_is_saved_by_time_between_log_intervals() -> None:
    saved = on_ranks(2, saved_by_time)[0]
    assert len(saved) >= 3  # within 1.5 s at least; on a busy machine there are more


def test_an_action_by_two_triggers_runs_once_a_step() -> None:
    assert on_ranks(1, each_step) == [list(range(1, 31))]


def each_step() -> list[int]:
    ran: list[int] = []
    fit(0.01, max_steps=30, actions=[rankwise.every(lambda state: ran.append(state.step), steps=1, seconds=0.02)])
    return ran


def stopped_by(who: list[int], **arguments: Any) -> list[Any]:
    """For two runs of one command: (the last step, whether the script has stopped it, why)."""

    def stop(state: TrainState) -> None:
        if state.step == 7 and comm.rank() in who:
            state.stop(f"rank {comm.rank()} has had enough")

    found = []
    for _ in range(2):
        state = fit(actions=[stop], **arguments)
        found.append((state.step, state.stopped, state.stop_reason))
    return found


@pytest.mark.parametrize(("who", "last"), [([0, 1], {7}), ([1], {7, 8}), ([0], {7, 8})])
def test_a_run_that_its_script_has_stopped_is_saved_and_does_not_begin_again(who: list[int], last: set[int]) -> None:
    first, second = on_ranks(2, stopped_by, who, at_steps=(7,))  # when it is stopped there, this step is already saved
    assert first == second
    assert first[0] == first[1]
    assert first[0][1:] == (True, f"rank {min(who)} has had enough")
    assert first[0][0] in last
    assert RunDir(RUN).saved()[-1].startswith(f"step-{first[0][0]:08d}")


def stopped_after(at: int) -> dict[str, Any]:
    """The steps after which each action ran, and the last step."""
    ran: dict[str, list[Any]] = {"at the end": [], "both": [], "evaluation": []}

    def stop(state: TrainState) -> None:
        if state.step == at:
            state.stop("enough")

    def at_end(state: TrainState) -> None:
        ran["at the end"].append((state.step, state.last, sorted(state.measured_now)))
        state.stop("again")

    def error(_: nn.Module, batch: Any) -> dict[str, Any]:
        step = trainer.state.step
        ran["evaluation"].append(step)
        return {"error": (step * len(batch[0]), len(batch[0]))}

    both = rankwise.every(lambda state: ran["both"].append(state.step), steps=at, at_end=True)
    trainer = new_trainer(
        eval_data=TensorDataset(torch.zeros(2, 4)), eval_fn=error, eval_every=5, keep_best="eval_error", larger_is_better=True,
        actions=[stop, rankwise.every(at_end, at_end=True), both],
    )  # fmt: skip
    state = trainer.fit()
    return {**ran, "end": (state.step, state.stop_reason)}


def stopped_twice(at: int) -> list[dict[str, Any]]:
    return [stopped_after(at), stopped_after(at)]


@pytest.mark.parametrize(("ranks", "at", "evaluated"), [(1, 7, [5, 7]), (2, 7, [5, 7]), (1, 10, [5, 10])])
@pytest.mark.one_in(2)
def test_what_is_due_at_the_end_runs_once_if_the_script_stops_the_run(ranks: int, at: int, evaluated: list[int]) -> None:
    nothing: dict[str, list[Any]] = {"at the end": [], "both": [], "evaluation": []}
    for first, resumed in on_ranks(ranks, stopped_twice, at):
        at_end = [(at, True, ["eval_error", "loss"])]
        assert first == {"at the end": at_end, "both": [at], "evaluation": evaluated, "end": (at, "enough")}
        assert resumed == {**nothing, "end": (at, "enough")}
    measured = {record["step"]: record["eval_error"] for record in RunDir(RUN).read_metrics() if "eval_error" in record}
    assert measured == {step: step for step in evaluated}
    best = rankwise.Checkpoints(RUN / "checkpoints", keep_best="eval_error", larger_is_better=True).best()
    assert best is not None
    assert best.name.startswith(f"step-{at:08d}")


def said_when_stopped() -> tuple[list[Any], str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return stopped_by([0]), said.getvalue()


def test_a_lone_rank_that_its_script_has_stopped_says_so_when_it_is_started_again() -> None:
    [(ends, _)] = answers = on_ranks(1, said_when_stopped)
    assert ends == [(7, True, "rank 0 has had enough")] * 2
    said = answers[0][1]
    assert "stopped by the script (rank 0 has had enough): 7 steps, " in said
    assert "stopped by the script at step 7: rank 0 has had enough;\n  for a new run: fit(fresh=True)" in said


def without_a_gate() -> list[Any]:
    def knock(*_: object) -> None:
        raise coordinator.NobodyThere("10.0.0.1, port 1: no route to host")

    coordinator.knock, coordinator._MEET_S = knock, 0.2  # type: ignore[assignment]
    return stopped_by([1], log_every=5)


def test_where_nodes_do_not_reach_each_other_a_stop_is_agreed_at_the_next_log_interval() -> None:
    answers = on_ranks(2, without_a_gate, environ=[torchrun(r, 2, 1) for r in range(2)])
    assert answers == [[(8, True, "rank 1 has had enough")] * 2] * 2  # the epoch ends with step 8, which is logged


def test_a_state_without_a_trainer_cannot_be_stopped() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"in your own loop, call stop\.ask"):
        TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)).stop()


def rates() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        fit(0.05, max_steps=20, log_every=None, actions=[Log(4, 0.0)])
    return said.getvalue()


def test_samples_a_second_of_all_ranks_are_in_the_metrics_and_in_the_lines() -> None:
    said = on_ranks(2, rates)[0]
    records = RunDir(RUN).read_metrics()
    assert [record["step"] for record in records] == [4, 8, 12, 16, 20]
    for before, record in zip([{"clock_s": 0.0}, *records], records, strict=False):
        elapsed_s = record["clock_s"] - before["clock_s"]
        assert record["samples_per_s"] == pytest.approx(32 / elapsed_s, rel=0.2)
    [first] = re.findall(rf": loss {records[0]['loss']:.4g}, (\S+) samples/s", said)
    assert float(first) == pytest.approx(records[0]["samples_per_s"], rel=0.2)


def slower_at_first() -> str:
    def wait(state: TrainState) -> None:
        time.sleep(0.2 if state.step <= 4 else 0.1)

    with contextlib.redirect_stdout(io.StringIO()) as said:
        fit(max_steps=9, global_batch_size=4, log_every=None, actions=[Log(4, 1.0), wait])
    return said.getvalue().replace("\n  ", " ")


def test_samples_and_steps_a_second_of_a_line_are_both_since_the_line_before() -> None:
    said = on_ranks(1, slower_at_first)[0]
    lines = re.findall(r": loss \S+, (\S+) samples/s, lr \S+, (\S+) steps/s", said)
    assert lines
    for samples_per_s, steps_per_s in lines:
        assert float(samples_per_s) == pytest.approx(4 * float(steps_per_s), rel=0.2)


def measured_by_time() -> tuple[int, int, int, bool]:
    """(the step at which EarlyStopping has stopped the run, steps of the scheduler, records, whether there is a best)."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 4))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        time.sleep(0.01)
        return model(batch[0]).square().sum(), len(batch[0])

    actions = [
        rankwise.every(rankwise.Evaluate(data), seconds=0.05),
        Plateau(scheduler),
        EarlyStopping("eval_loss", patience=2),
    ]
    checkpoints = rankwise.Checkpoints(keep_best="eval_loss")
    trainer = rankwise.Trainer(
        model, optimizer, step, data, global_batch_size=8, max_steps=2000, run_dir=RUN, actions=actions, checkpoints=checkpoints
    )
    state = trainer.fit()
    records = [record for record in RunDir(RUN).read_metrics() if "eval_loss" in record]
    return state.step, scheduler.last_epoch, len(records), checkpoints.best() is not None


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_an_evaluation_by_time_measures_is_seen_by_the_actions_after_it_by_the_log_and_by_keep_best(ranks: int) -> None:
    stopped_at, scheduled, records, has_best = on_ranks(ranks, measured_by_time)[0]
    assert stopped_at < 2000  # the loss does not change, so it stops after the third evaluation
    assert (scheduled, records, has_best) == (3, 3, True)
