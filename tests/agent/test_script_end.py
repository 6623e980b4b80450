"""The end of a rank's script: its files are complete, and its objects are destroyed, as at the end of the interpreter."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import signal
import sys
import threading
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import launch

from rankwise.agent import script_end

__all__ = ["launch"]  # a fixture


def closed_file() -> io.TextIOWrapper:
    file = io.TextIOWrapper(io.BytesIO())
    file.close()
    return file


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize(("stream", "status"), [(io.StringIO(), 0), (closed_file(), 0), (None, 0), (object(), 120)])
def test_output_is_lost_as_python_itself_reports_it_which_passes_over_streams_that_the_script_has_closed(
    name: str, stream: Any, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, name, stream)
    assert script_end.flush_streams() == status


def test_no_output_is_lost_if_the_script_has_deleted_its_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "stdout")
    assert script_end.flush_streams() == 0


FILES = """
import gzip, os, sys, tempfile, zipfile
import h5py
me = os.environ["RANK"]
packed = gzip.open(me + ".gz", "wt")
packed.write("all")
archive = zipfile.ZipFile(me + ".zip", "w")
archive.writestr("a.txt", "all")
numbers = h5py.File(me + ".h5", "w")
numbers["loss"] = [1, 2, 3]
brief = tempfile.NamedTemporaryFile(dir=".", prefix="brief-")
class Says:
    def __del__(self): print("destroyed", sys.argv[1])
said = Says()
"""


@pytest.mark.parametrize("end", ["", "raise ValueError", pytest.param("raise KeyboardInterrupt", marks=pytest.mark.stress)])
def test_files_that_a_script_does_not_close_are_complete(end: str, launch, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    run = launch(FILES + end, "argument", options=("--nproc", "1"))
    assert bool(run.wait()) == bool(end), run.output()
    with gzip.open(tmp_path / "0.gz", "rt") as packed:
        assert packed.read() == "all"
    with zipfile.ZipFile(tmp_path / "0.zip") as archive:
        assert archive.read("a.txt") == b"all"
    with h5py.File(tmp_path / "0.h5") as numbers:
        assert list(numbers["loss"]) == [1, 2, 3]
    assert list(tmp_path.glob("brief-*")) == []
    assert run.run.log(0).read_text().endswith("destroyed argument\n")


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those of a script."""
    script = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    return vars(script)


class Writer:
    """Its destructor uses other variables of the script."""

    def __init__(self, variables: dict[str, Any], said: list[str], name: str) -> None:
        self.variables, self.said, self.name = variables, said, name

    def __del__(self) -> None:
        kept = [name for name, value in self.variables.items() if value is not None and not name.startswith("__")]
        self.said.append(f"{self.name} of {' '.join(kept)}")


class Net(torch.nn.Module):
    pass


def test_a_destructor_finds_the_variables_that_were_made_before(variables: dict[str, Any]) -> None:
    said: list[str] = []
    variables |= {"math": types, "rank": 3, "help": lambda: None, "first": Writer(variables, said, "first")}
    variables |= {"second": Writer(variables, said, "second"), "Kind": Writer}
    script_end.drop_variables()
    assert said == ["second of math rank help first Kind", "first of math rank help Kind"]


def test_the_objects_of_torch_stay(variables: dict[str, Any]) -> None:
    kept = {"model": Net(), "weights": torch.ones(2)}
    variables |= kept
    script_end.drop_variables()
    assert kept.items() <= variables.items()


def test_a_daemon_thread_that_misses_a_variable_is_silent(
    variables: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    variables["rows"] = []
    dropped = threading.Event()

    def follow() -> None:
        dropped.wait()
        variables["rows"].append(1)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    script_end.drop_variables()
    dropped.set()
    thread.join()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("opened", [gzip.open, bz2.open, lzma.open])
def test_a_compressed_file_that_a_module_keeps_is_complete(opened: Any, tmp_path: Path) -> None:
    file = opened(tmp_path / "metrics", "wt")
    file.write("all")
    script_end.complete_files()
    assert opened(tmp_path / "metrics", "rt").read() == "all"


def test_an_hdf5_file_that_a_module_keeps_is_complete(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    kept = h5py.File(tmp_path / "metrics.h5", "w")
    loss = kept.create_dataset("loss", data=[1, 2])
    script_end.complete_files()
    assert not kept
    assert not loss
    with h5py.File(tmp_path / "metrics.h5") as file:
        assert list(file["loss"]) == [1, 2]


def test_an_archive_over_an_open_file_is_complete(tmp_path: Path) -> None:
    file = open(tmp_path / "metrics.zip", "wb")  # noqa: SIM115
    archive = zipfile.ZipFile(file, "w")
    archive.writestr("a.txt", "all")
    script_end.complete_files()
    assert zipfile.ZipFile(tmp_path / "metrics.zip").read("a.txt") == b"all"
    file.close()


def test_a_handler_that_raises_does_not_prevent_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(script_end, "drop_variables", lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(script_end, "complete_files", lambda: done.append("files"))
    assert script_end.finish() == 0
    assert done == ["files"]
