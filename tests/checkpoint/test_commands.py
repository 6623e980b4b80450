"""`rankwise checkpoint ls, show, verify, export, average, prune`, as the user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import Box, of_step
from click.testing import CliRunner, Result
from torch import nn

from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint.commands import find_prunable, parse_age
from rankwise.cli import main
from rankwise.errors import ConfigError

Run = Callable[..., Result]
STEPS = (100, 200, 300, 400, 500)
LOSSES = {100: 2.5, 200: 1.5, 300: 0.5, 400: 1.25, 500: 3.0}


def net(step: int) -> nn.Module:
    """A model whose weights are `step`, its bias a tenth of it, and its number of tracked batches the same."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for parameter in model.parameters():
        nn.init.constant_(parameter, step)
    model[1].num_batches_tracked.fill_(step)  # type: ignore[operator, union-attr]
    return model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five checkpoints of the run `a`, the third of which is the best. The current folder contains ./runs."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a" / "checkpoints"
    checkpoints = Checkpoints(folder, keep_last=9, keep_best="eval_loss", background=False)
    for step in STEPS:
        model = net(step)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoints.save({"model": model, "optimizer": optimizer}, step, {"threads": 2}, {"eval_loss": LOSSES[step]})
    return folder


@pytest.fixture
def typed() -> Run:
    def run(*words: str) -> Result:
        return CliRunner().invoke(main, ["checkpoint", *words])

    return run


def spoil(path: Path, text: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(text) + 1] ^= 1
    path.write_bytes(data)


def weights(step: int) -> bytes:
    return torch.full((4, 3), float(step)).numpy().tobytes()


def names(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted(folder.iterdir())]


# --- ls, show, verify


def test_ls_has_a_line_for_each_with_its_figures_and_names_the_best(typed: Run) -> None:
    head, *lines = typed("ls").output.splitlines()
    assert head.split() == ["checkpoint", "step", "saved", "size", "ranks", "eval_loss"]
    assert [line.split()[:2] for line in lines] == [[f"step-{s:08d}", str(s)] for s in STEPS]
    assert all(time.strftime("%Y-%m-%d ") in line for line in lines)
    assert [line for line in lines if "the best eval_loss" in line] == [lines[2]]
    assert all("sizes match" in line for line in lines)


def test_ls_sees_what_is_cut_and_with_verify_what_is_changed(folder: Path, typed: Run) -> None:
    spoil(folder / "step-00000200" / "model.pt", weights(200))
    (folder / "step-00000300" / "model.pt").write_bytes(b"")
    (folder / "step-00000400" / "rng.pt").unlink()
    (folder / "step-00000500" / "manifest.json").write_text("{")
    states = [line.rsplit("  ", 1)[-1].strip() for line in typed("ls").output.splitlines()[1:]]
    assert [s.split(":")[0] for s in states] == ["sizes match", "sizes match", "corrupted", "corrupted", "corrupted"]
    assert "model.pt has 0 of " in states[2]
    assert "rng.pt: No such file" in states[3]
    assert "manifest.json is corrupted" in states[4]
    lines = typed("ls", "a", "--verify").output.splitlines()[1:]
    assert lines[0].endswith("verified")
    assert lines[1].endswith("model.pt is corrupted in tensor 0.weight")


def test_show_tells_parts_tensors_types_shapes_and_sizes(typed: Run) -> None:
    text = typed("show", "a").output
    assert "step-00000500: step 500, saved 20" in text
    assert "by 1 rank with torch" in text
    assert "metrics: eval_loss 3\nmade with: threads 2\n" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("model/")}
    assert rows["model/0.weight"] == ["float32", "4", "x", "3", "48", "B"]
    assert rows["model/1.num_batches_tracked"] == ["int64", "scalar", "8", "B"]
    record = json.loads(typed("show", "--checkpoint", "300", "--json").output)
    assert (record["name"], record["step"], record["metrics"]) == ("step-00000300", 300, {"eval_loss": 0.5})
    at = record["files"]["model.pt"]["layout"]["0.weight"]
    data = (Path(record["path"]) / "model.pt").read_bytes()
    assert data[at["offset"] : at["offset"] + at["bytes"]] == weights(300)


def test_verify_names_each_damaged_file_and_tensor_and_ends_with_1(folder: Path, typed: Run) -> None:
    assert (typed("verify").exit_code, typed("verify", "a", "--checkpoint", "step-00000100").exit_code) == (0, 0)
    for step in (200, 400):
        spoil(folder / f"step-00000{step}" / "model.pt", weights(step))
    (folder / "step-00000400" / "rng.pt").write_bytes(b"")
    done = typed("verify")
    assert done.exit_code == 1
    short = Path("runs/a/checkpoints")
    assert done.output.splitlines() == [
        "step-00000100 is intact",
        f"{short}/step-00000200/model.pt is corrupted in tensor 0.weight",
        "step-00000300 is intact",
        f"{short}/step-00000400/model.pt is corrupted in tensor 0.weight",
        *[line for line in done.output.splitlines() if "rng.pt has 0 of" in line],
        "step-00000500 is intact",
    ]


def test_a_run_is_found_by_name_by_its_folder_by_its_checkpoints_and_alone(folder: Path, typed: Run) -> None:
    for words in ((), ("a",), ("runs/a",), (str(folder),)):
        assert typed("ls", *words).output.count("sizes match") == 5


def test_what_a_verb_does_is_not_cut_in_the_list_of_verbs(typed: Run) -> None:
    lines = typed("--help").output.split("Commands:")[1].split("\n")
    assert [line.split()[0] for line in lines if line] == ["ls", "show", "verify", "export", "average", "prune"]
    assert not [line for line in lines if line.endswith("...")]


def test_looking_and_verifying_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch on this machine')")
    for words in (["ls", "--verify"], ["show"], ["verify"], ["prune", "--keep-last", "1"]):
        done = subprocess.run(
            [sys.executable, "-m", "rankwise", "checkpoint", *words], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


# --- export, average


def load(path: Path) -> dict[str, Any]:
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)  # type: ignore[no-any-return]
    return dict(pytest.importorskip("safetensors.torch").load_file(path))


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_an_exported_model_is_loaded_by_the_bare_module(kind: str, tmp_path: Path, typed: Run) -> None:
    done = typed("export", "a", "--to", f"model.{kind}", "--checkpoint", "300")
    assert done.output == f"model of step-00000300 written to model.{kind}\n"
    model = net(0)
    model.load_state_dict(load(tmp_path / f"model.{kind}"))
    assert {float(p.detach().mean()) for p in model.parameters()} == {300.0}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [f"model.{kind}"]  # no incomplete file beside it
    (tmp_path / "plain").touch()
    assert (tmp_path / f"model.{kind}").stat().st_mode == (tmp_path / "plain").stat().st_mode  # others may read it


class Tied(nn.Module):
    """Two layers with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = nn.Linear(2, 2)


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_prefixes_of_wrappers_go_and_tied_weights_load_as_their_format_has_them(
    kind: str, folder: Path, tmp_path: Path, typed: Run
) -> None:
    model, again = Tied(), Tied()
    Checkpoints(folder, background=False).save({"model": nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": model})})}, 600)
    assert typed("export", "--to", f"m.{kind}").exit_code == 0
    path = tmp_path / f"m.{kind}"
    if kind == "safetensors":
        assert sorted(load(path)) == ["one.bias", "one.weight"]
        assert pytest.importorskip("safetensors.torch").load_model(again, path) == (set(), [])
    else:
        again.load_state_dict(load(path))
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize(("words", "mean"), [(("--last", "2"), 450.0), (("--best", "2"), 350.0), (("--last", "1"), 500.0)])
@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_mean_is_that_of_the_last_or_of_the_best(
    kind: str, words: tuple[str, str], mean: float, tmp_path: Path, typed: Run
) -> None:
    assert typed("average", "a", *words, "--to", f"mean.{kind}").exit_code == 0
    state = load(tmp_path / f"mean.{kind}")
    assert {float(value.mean()) for name, value in state.items() if name.endswith(("weight", "bias"))} == {mean}
    assert {value.dtype for name, value in state.items() if name.endswith("weight")} == {torch.float32}
    newest = {"--last": 500, "--best": 400}[words[0]]
    assert state["1.num_batches_tracked"].item() == newest


def test_a_mean_is_summed_in_float64(folder: Path, tmp_path: Path, typed: Run) -> None:
    """In float32, 2^24 + 1 + 1 would be 2^24; bfloat16 is worse."""
    for step, value in ((601, 2.0**24), (602, 1.0), (603, 1.0)):
        state = {"w": torch.full((2,), value), "low": torch.full((1,), value, dtype=torch.bfloat16), "n": torch.tensor([step])}
        box = nn.Module()
        for name, tensor in state.items():
            box.register_buffer(name, tensor)
        Checkpoints(folder, keep_last=9, background=False).save({"model": box}, step)
    assert typed("average", "--last", "3", "--to", "mean.pt").exit_code == 0
    mean = load(tmp_path / "mean.pt")
    expected = torch.tensor((2.0**24 + 2.0) / 3.0, dtype=torch.float64)
    assert mean["w"][0] == expected.float()
    assert mean["low"][0] == expected.bfloat16()
    assert mean["n"].item() == 603


def test_the_mean_of_a_nested_part_has_the_means_of_all_its_tensors(folder: Path, tmp_path: Path, typed: Run) -> None:
    """Two networks in one part, for example."""
    for step in (601, 603):
        nested = {
            "g": net(step).state_dict(),
            "d": [{1: torch.tensor([step / 2])}, (torch.tensor(step),)],
            "n": Counter(a=step),
        }
        Checkpoints(folder, keep_last=9, background=False).save({"gan": Box(nested)}, step)
    assert typed("average", "--last", "2", "--part", "gan", "--to", "mean.pt").exit_code == 0
    mean = load(tmp_path / "mean.pt")["value"]
    assert {float(value.mean()) for name, value in mean["g"].items() if name.endswith(("weight", "bias"))} == {602.0}
    assert mean["g"]._metadata == net(0).state_dict()._metadata  # type: ignore[attr-defined]
    assert mean["g"]["1.num_batches_tracked"].item() == 603
    assert mean["d"] == [{1: torch.tensor([301.0])}, (torch.tensor(603),)]
    assert mean["n"] == {"a": 603}


def test_nested_parts_of_different_shapes_have_no_mean(folder: Path, typed: Run) -> None:
    for step, size in ((601, 2), (602, 3)):
        Checkpoints(folder, keep_last=9, background=False).save({"gan": Box({"g": torch.ones(size)})}, step)
    done = typed("average", "--last", "2", "--part", "gan", "--to", "m.pt")
    assert done.exit_code == 2
    assert "are of different models: value/g has different shapes" in done.output


def test_a_damaged_checkpoint_is_neither_exported_nor_averaged(folder: Path, tmp_path: Path, typed: Run) -> None:
    spoil(folder / "step-00000500" / "model.pt", weights(500))
    for words in (("export",), ("average", "--last", "2")):
        done = typed(*words, "--to", "m.pt")
        assert done.exit_code == 1
        assert "step-00000500/model.pt is corrupted in tensor 0.weight" in done.output
    assert not (tmp_path / "m.pt").exists()
    (folder / "step-00000400" / "optimizer.pt").write_bytes(b"")  # not the model's file: the model is intact
    assert typed("export", "--checkpoint", "400", "--to", "m.pt").exit_code == 0


# --- prune


def test_prune_says_what_it_would_remove_and_removes_it_with_yes(folder: Path, typed: Run) -> None:
    done = typed("prune", "a", "--keep-last", "2", "--keep-best", "1", "--keep", "step-00000100")
    assert "would remove" in done.output
    assert "step-00000200" in done.output
    assert names(folder) == list(STEPS)
    done = typed("prune", "a", "--keep-last", "2", "--keep-best", "1", "--keep", "100", "--yes")
    assert done.output == "removed runs/a/checkpoints/step-00000200\n"
    assert names(folder) == [100, 300, 400, 500]
    assert typed("prune", "--keep-last", "9").output == "nothing to remove\n"


def test_prune_by_age_spares_the_young_and_the_newest_that_is_whole(folder: Path, typed: Run) -> None:
    for path, days in zip(sorted(folder.iterdir()), (20, 9, 8, 6, 5), strict=True):
        os.utime(path / "manifest.json", times=(time.time() - days * 86400.0,) * 2)
    assert typed("prune", "--older-than", "7d", "--keep-last", "3", "--yes").exit_code == 0
    assert names(folder) == [300, 400, 500]
    assert typed("prune", "--older-than", "7d", "--yes").exit_code == 0
    assert names(folder) == [400, 500]
    assert typed("prune", "--older-than", "1s", "--yes").exit_code == 0
    assert names(folder) == [500]


def test_prune_removes_an_older_one_without_a_manifest_by_the_time_of_its_folder(folder: Path, typed: Run) -> None:
    for step in (200, 300):
        (folder / f"step-00000{step}" / "manifest.json").unlink()
    os.utime(folder / "step-00000200", times=(time.time() - 8 * 86400.0,) * 2)
    assert typed("prune", "--older-than", "7d", "--yes").exit_code == 0
    assert names(folder) == [100, 300, 400, 500]
    assert typed("prune", "--keep-last", "2", "--yes").exit_code == 0
    assert names(folder) == [400, 500]


def test_the_last_verified_one_is_never_removed(folder: Path, typed: Run) -> None:
    for step in (300, 400, 500):
        (folder / f"step-00000{step}" / "model.pt").write_bytes(b"")
    assert typed("prune", "--keep-last", "1", "--yes").exit_code == 0
    assert names(folder) == [200, 300, 400, 500]  # 300 and up: newer than all intact ones, so their owner may look at them
    (folder / "step-00000200" / "model.pt").write_bytes(b"")
    done = typed("prune", "--keep-last", "1", "--yes")
    assert done.exit_code == 1
    assert "no checkpoint in runs/a/checkpoints is intact, so none is removed" in done.output
    assert names(folder) == [200, 300, 400, 500]


def test_a_damaged_one_counts_neither_as_one_of_the_last_nor_as_the_best(folder: Path, typed: Run) -> None:
    (folder / "step-00000400" / "model.pt").write_bytes(b"")
    spoil(folder / "step-00000300" / "model.pt", weights(300))
    assert typed("prune", "--keep-last", "2", "--keep-best", "1", "--yes").exit_code == 0
    assert names(folder) == [200, 500]


def test_the_direction_of_a_metric_is_that_by_which_the_run_kept_its_best(tmp_path: Path, typed: Run) -> None:
    there = tmp_path / "runs" / "b" / "checkpoints"
    checkpoints = Checkpoints(there, keep_last=9, keep_best="eval_acc", larger_is_better=True, background=False)
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.6)):
        checkpoints.save({"model": net(step)}, step, metrics={"eval_acc": accuracy, "wer": 1.0 - accuracy})
    best = ("average", "b", "--best", "1", "--to", "m.pt", "--force", "--by")
    assert "step-00000002" in typed(*best, "eval_acc").output
    assert "step-00000002" in typed(*best, "wer", "--less-is-better").output
    assert "step-00000001" in typed(*best, "eval_acc", "--less-is-better").output
    asked = "--by wer: is a larger value better? Type --larger-is-better or --less-is-better\n"
    assert typed(*best, "wer").output.endswith(asked)
    assert typed("prune", "b", "--keep-best", "1", "--by", "wer").output.endswith(asked)
    assert typed("prune", "b", "--keep-best", "1", "--by", "eval_acc", "--yes").exit_code == 0
    assert names(there) == [2, 3]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("1.5h", 5400.0), ("7d", 604800.0), ("2w", 1209600.0), ("5m", 300.0)]
)
def test_an_age_has_a_unit(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-7d", "7 days", "7y", "nand"])
def test_what_is_no_age_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an age; type a number and a unit"):
        parse_age(text)


def test_a_checkpoint_that_a_faster_clock_has_saved_is_not_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3, background=False)
    saved = [checkpoints.save(of_step(step), step) for step in (1, 2, 3)]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    for path, age in zip(saved, (0.0, -0.5, 0.0), strict=True):
        os.utime(path / "manifest.json", times=(now - age,) * 2)
    assert find_prunable(tmp_path, keep_last=1) == [saved[0]]


# --- what is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ls", "nothing"), "there is no run nothing; "),
        (
            ("show", "--checkpoint", "7"),
            "--checkpoint 7: no such checkpoint in runs/a/checkpoints; there are: step-00000100, step",
        ),
        (("export", "--to", "model.bin"), "--to model.bin: the name must end in .pt or .safetensors; type --to model.bin.pt"),
        (("export", "--to", "there.pt"), "there.pt exists already; choose another name, or type --force"),
        (("export", "--to", "no/such/m.pt"), "cannot write no/such/m.pt: there is no folder no/such"),
        (("export", "--to", f"{'m' * 230}.pt"), f"cannot write {'m' * 230}.pt: File name too long"),  # of the temporary file
        (("export", "--to", "m.pt", "--part", "ema"), "has no part ema; choose one with --part: model, optimizer, rng"),
        (
            ("export", "--to", "m.safetensors", "--part", "optimizer"),
            "a .safetensors file holds only tensors; type --to model.pt",
        ),
        (("average", "--to", "m.pt"), "Type --last N or --best N"),
        (("average", "--to", "m.pt", "--last", "1", "--best", "1"), "Type --last N or --best N"),
        (
            ("average", "--to", "m.pt", "--last", "9"),
            "--last 9: found only 5 checkpoints in runs/a/checkpoints; type --last 5",
        ),
        (
            ("average", "--to", "m.pt", "--last", "2", "--part", "rng"),
            "step-00000500 has no floating-point tensors to average; give another --part",
        ),
        (("average", "--to", "m.pt", "--last", "0"), "--last 0: give a whole number of at least 1"),
        (
            ("average", "--to", "m.pt", "--best", "1", "--by", "x_loss"),
            "--by x_loss: no such metric; the metrics are: eval_loss",
        ),
        (("average", "--to", "m.pt", "--best", "1", "--less-is-better"), "--less-is-better need --by NAME, the metric that"),
        (("prune",), "which checkpoints should be kept? Type for example --keep-last 2"),
        (("prune", "--older-than", "7"), "--older-than '7' is not an age; type a number and a unit"),
        (("prune", "--keep-last", "0"), "--keep-last 0: give a whole number of at least 1"),
        (("prune", "--keep-best", "1", "--by", "nope"), "--by nope: no such metric; the metrics are: eval_loss"),
        (("prune", "--keep", "7"), "--keep 7: no such checkpoint in"),
    ],
)
def test_what_cannot_be_is_one_clear_line(words: tuple[str, ...], said: str, tmp_path: Path, typed: Run) -> None:
    (tmp_path / "there.pt").write_text("mine")
    done = typed(*words)
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    assert said in done.output
    assert len(done.output.splitlines()) == 1
    assert (tmp_path / "there.pt").read_text() == "mine"
    assert not (tmp_path / "m.pt").exists()


def test_models_of_different_shapes_have_no_mean(folder: Path, typed: Run) -> None:
    Checkpoints(folder, background=False).save({"model": nn.Linear(2, 2)}, 600)
    done = typed("average", "--last", "2", "--to", "m.pt")
    assert done.exit_code == 2
    assert "are of different models" in done.output


def test_without_safetensors_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, typed: Run) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    done = typed("export", "--to", "model.safetensors")
    assert done.exit_code == 2
    assert "safetensors is not installed; give --to model.pt, or type: pip install 'rankwise[safetensors]'" in done.output


def test_of_several_runs_one_must_be_named(tmp_path: Path, typed: Run) -> None:
    Checkpoints(tmp_path / "runs" / "b" / "checkpoints", background=False).save({"model": nn.Linear(1, 1)}, 1)
    done = typed("ls")
    assert done.exit_code == 2
    assert "which run? Type its name or folder; the runs with checkpoints here: a, b" in done.output
