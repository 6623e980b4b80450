"""Files that cannot be used for training: one error names the file, what was found and what to do. And unusual files that
can."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rankwise
from rankwise.errors import DataError
from rankwise.hdf5 import HDF5Dataset, HDF5Writer


def plain(path: Path, **datasets: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, content in (datasets or {"x": np.arange(4000.0)}).items():
            file[name] = content
    return path


def truncated(path: Path) -> Path:
    os.truncate(plain(path), 9000)
    return path


def text(path: Path) -> Path:
    path.write_text("x, y\n1, 2\n")
    return path


def empty(path: Path) -> Path:
    path.touch()
    return path


def compound(path: Path) -> Path:
    return plain(path, x=np.zeros(3, [("a", "i4"), ("b", "f4")]))


def next_gen(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file["seq_names"] = ["a"]
        file["streams/data/data/a"] = np.zeros(3)
    return path


def opaque(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file["group/x"] = np.arange(3)
    return path


@pytest.mark.parametrize(
    ("make", "ways", "said"),
    [
        (truncated, {}, "x.h5 is truncated; copy it or create it again"),
        (text, {}, "x.h5 is not an HDF5 file"),
        (empty, {}, "x.h5 is not an HDF5 file"),
        (lambda path: path, {}, "x.h5: there is no such file"),
        (lambda path: path.mkdir(), {}, "x.h5 is a folder; give the files in it, for example '"),
        (compound, {}, "x has the type [('a', '<i4'), ('b', '<f4')]; only numbers, bool and strings can be read"),
        (next_gen, {}, "is a file of RETURNN's NextGenHDFDataset"),
        (plain, {"fields": ["y"]}, "the dataset y is not there; there is x"),
        (opaque, {"fields": "group"}, "the dataset group is a group"),
        (opaque, {}, "has no dataset at the top level; there is group; give fields=['group/name']"),
        (lambda path: plain(path, x=3), {"fields": "x"}, "x is a single value"),
        (lambda path: plain(path, x=np.zeros((0, 3))), {}, "the dataset has no samples"),
        (lambda path: plain(path, x=np.arange(3), n=[1, -1, 3]), {"lengths": {"x": "n"}}, "the length of sample 1 of x is -1"),
        (
            lambda path: plain(path, x=np.arange(5), n=[1, 3]),
            {"lengths": {"x": "n"}},
            "x has 5 rows (x), but the lengths of its",
        ),
        (lambda path: plain(path, x=np.arange(5), n=[1.0, 4.0]), {"lengths": {"x": "n"}}, "n must have one integer per sample"),
        (
            lambda path: plain(path, x=np.arange(5), y=np.arange(4)),
            {},
            "have different numbers of samples: x 5, y 4; give fields",
        ),
    ],
)
def test_a_file_that_does_not_hold_together_is_one_error(
    tmp_path: Path, make: Callable[..., Any], ways: Any, said: str
) -> None:
    make(tmp_path / "x.h5")
    with pytest.raises(DataError) as caught:
        HDF5Dataset(tmp_path / "x.h5", **ways)
    assert said in str(caught.value)
    assert str(tmp_path / "x.h5") in str(caught.value)


def test_a_pattern_that_no_file_has_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file matches .*train-\*\.h5"):
        HDF5Dataset(tmp_path / "train-*.h5")


def test_a_file_that_is_being_written_is_told(tmp_path: Path) -> None:
    code = "import h5py, sys; f = h5py.File(sys.argv[1], 'w'); f['x'] = [1]; print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(tmp_path / "x.h5")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(DataError, match=r"x\.h5 is being written: another program has it open"):
            HDF5Dataset(tmp_path / "x.h5")
        writer.communicate()
    assert HDF5Dataset(tmp_path / "x.h5", fields="x")[0] == 1


def test_a_file_that_is_cut_while_it_is_read_is_one_error_and_no_signal(tmp_path: Path) -> None:
    for name, opened_before in (("x.h5", True), ("y.h5", False)):
        dataset = HDF5Dataset(plain(tmp_path / name), fields="x")
        if opened_before:
            assert dataset[3999] == 3999
        os.truncate(tmp_path / name, 20_000)
        with pytest.raises(
            DataError, match=rf"{name} was shortened to (20000|0) bytes after it was opened, and x ends at byte"
        ):
            dataset.read_batch(np.array([3999]))


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    dataset = HDF5Dataset(plain(tmp_path / "x.h5"), fields="x")
    assert dataset[1] == 1
    plain(tmp_path / "new.h5", x=np.zeros(2)).replace(tmp_path / "x.h5")
    assert dataset[3999] == 3999


@pytest.mark.parametrize("library", ["isal.isal_zlib", "zlib"])
@pytest.mark.parametrize("how", [{"compression": "gzip"}, {"fletcher32": True}])
def test_a_damaged_chunk_is_named(tmp_path: Path, how: dict[str, Any], library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.hdf5.rows._fastest_zlib", lambda: import_module(library))
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", data=np.random.default_rng(0).random(1000), chunks=(100,), **how)
        at = dataset.id.get_chunk_info(3)
    with path.open("r+b") as raw:
        raw.seek(at.byte_offset + at.size // 2)
        byte = raw.read(1)
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([byte[0] ^ 255]))
    read = HDF5Dataset(path, fields="x")
    assert read[299] >= 0
    with pytest.raises(DataError, match=r"x\.h5: rows 300 to 399 of x cannot be read; copy the file or create it again"):
        _ = read[300]


@pytest.mark.parametrize("how", [{}, {"compression": "gzip"}])
def test_a_file_that_is_gone_before_its_first_sample_is_one_error(tmp_path: Path, how: dict[str, Any]) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(10.0), **how)
    dataset = HDF5Dataset(path, fields="x")
    path.unlink()
    with pytest.raises(DataError, match=r"x\.h5(: there is no such file| cannot be read: No such file)"):
        _ = dataset[3]


def test_the_loader_says_which_samples_it_asked_for(tmp_path: Path) -> None:
    dataset = HDF5Dataset(plain(tmp_path / "x.h5"), fields="x")
    os.truncate(tmp_path / "x.h5", 20_000)
    loader = rankwise.Loader(dataset, global_batch_size=4, max_epochs=1, shuffle=False)
    with pytest.raises(DataError) as caught:
        next(iter(loader))
    assert caught.value.__notes__ == ["in samples 0, 1, 2, 3 of HDF5Dataset"]


# --- unusual, but right


def test_fewer_samples_than_ranks_and_one_longer_than_all_others(tmp_path: Path) -> None:
    with HDF5Writer(tmp_path / "x.h5") as writer:
        for length in (3, 5000, 0):
            writer.add(x=np.full((length, 2), length, "f4"))
    batch = HDF5Dataset(tmp_path / "x.h5")[[2, 1]]
    assert batch["x"].shape == (2, 5000, 2)
    assert batch["x"][0].sum() == 0


def test_more_than_2_to_31_rows(tmp_path: Path) -> None:
    rows = 2**31 + 10
    with h5py.File(tmp_path / "x.h5", "w") as file:
        kind = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        kind.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        kind.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, h5py.h5s.create_simple((rows,)), kind)
        offset = file["x"].id.get_offset()
        file["n"] = [rows - 3, 3]
    with (tmp_path / "x.h5").open("r+b") as raw:
        raw.seek(offset + rows - 3)
        raw.write(b"abc")
    assert HDF5Dataset(tmp_path / "x.h5", fields="x")[rows - 1] == ord("c")
    last = HDF5Dataset(tmp_path / "x.h5", fields="x", lengths={"x": "n"})
    assert last[1].tolist() == last[[1]][0].tolist() == list(b"abc")


# --- files that are read as h5py reads them


def linked(path: Path) -> Path:
    plain(path.with_name("other.h5"), x=np.arange(400.0), before=np.ones(7))
    with h5py.File(path, "w") as file:
        file["x"] = h5py.ExternalLink("other.h5", "x")
        file["filling"] = np.full(3000, 9.0)
    return path


def linked_by_group(path: Path) -> Path:
    with h5py.File(path.with_name("other.h5"), "w") as file:
        file["deep/x"] = np.arange(400.0)
    with h5py.File(path, "w") as file:
        file["filling"] = np.full(3000, 9.0)
        file["group"] = h5py.ExternalLink("other.h5", "deep")
    return path


def of_type(make: Callable[[], Any], compression: str | None) -> Callable[[Path], Path]:
    """A file whose field x, 0 to 3, has an HDF5 type that NumPy does not have."""

    def write(path: Path) -> Path:
        with h5py.File(path, "w") as file:
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            if compression is not None:
                properties.set_chunk((2,))
                properties.set_deflate(1)
            dataset = h5py.h5d.create(file.id, b"x", make(), h5py.h5s.create_simple((4,)), properties)
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(4, dtype=np.int32 if "INT" in str(make) else np.float32))
        return path

    return write


def brain_float() -> Any:
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def shifted_int() -> Any:
    kind = h5py.h5t.STD_I32LE.copy()
    kind.set_precision(24)
    kind.set_offset(8)
    return kind


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("kind", [brain_float, shifted_int])
def test_types_that_numpy_does_not_have_are_converted_by_hdf5(
    kind: Callable[[], Any], compression: str | None, tmp_path: Path
) -> None:
    path = of_type(kind, compression)(tmp_path / "x.h5")
    assert HDF5Dataset(path, fields="x")[:].tolist() == h5py.File(path)["x"][...].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("make", "name"), [(linked, "x"), (linked_by_group, "group/x")])
def test_a_link_into_another_file_is_followed(make: Callable[[Path], Path], name: str, tmp_path: Path) -> None:
    dataset = HDF5Dataset(make(tmp_path / "x.h5"), fields=name)
    assert dataset[[399, 3]].tolist() == [399.0, 3.0]


def written(path: Path, kind: str, others: int) -> None:
    """Samples 0 to 3 in the field x, after `others` values of a field before it."""
    with h5py.File(path.with_name("new"), "w") as file:
        if others:
            file["before"] = np.full((4, others), 7, np.int8)
        content = ["abcd"[k] for k in range(4)] if kind == "text" else np.arange(4)
        file.create_dataset("x", data=content, chunks=(2,) if kind == "chunks" else None)
        file.create_dataset("y", data=np.zeros((4, others + 1)))
    path.with_name("new").rename(path)


@pytest.mark.parametrize("kind", ["map", "chunks"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_was_replaced_is_never_read_at_the_places_of_the_old_one(kind: str, workers: int, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    written(path, kind, 0)
    dataset = HDF5Dataset(path, fields="x")
    written(path, kind, 0)  # the same again: its rows are where they were
    loader = rankwise.Loader(dataset, global_batch_size=4, shuffle=False, num_workers=workers, max_epochs=1)
    assert [batch.tolist() for [batch] in loader.once()] == [[0, 1, 2, 3]]
    dataset = HDF5Dataset(path, fields=["x", "y"])
    written(path, kind, 1000)
    loader = rankwise.Loader(dataset, global_batch_size=4, shuffle=False, num_workers=workers, max_epochs=1)
    with pytest.raises(DataError, match=r"x.h5 was replaced after it was opened, and [xy] is not stored as before; create"):
        list(loader)


@pytest.mark.parametrize("kind", ["map", "chunks"])
def test_a_file_that_was_written_again_in_its_place_is_not_read_at_the_places_of_the_old_one(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"

    def write(*names: str) -> None:
        with h5py.File(path, "w") as file:  # the same inode
            for name in names:
                file.create_dataset(name, data=np.full(64, ord(name)), chunks=(8,) if kind == "chunks" else None)
        os.utime(path, ns=(0, ord(names[0])))  # two files of one clock tick

    write("x", "y")
    size, dataset = path.stat().st_size, HDF5Dataset(path, fields="x")
    write("y", "x")
    assert path.stat().st_size == size
    if kind == "chunks":  # HDF5 looks them up
        assert dataset[3] == ord("x")
        return
    with pytest.raises(DataError, match=r"x\.h5 was replaced after it was opened, and x is not stored as before"):
        _ = dataset[3]


@pytest.mark.parametrize("writer", [{}, {"compress": "gzip"}, {"layout": "returnn"}])
def test_a_file_that_was_replaced_by_one_with_other_lengths_is_not_read_by_the_old_lengths(
    writer: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "x.h5"

    def write(lengths: Sequence[int]) -> None:
        with rankwise.HDF5Writer(path, overwrite=True, **writer) as out:
            for length in lengths:
                out.add(data=np.full(length, length), other=np.zeros(2), tag="a")

    write([1, 2, 3])
    dataset = HDF5Dataset(path, fields="data")
    write([1, 2, 3])
    assert dataset[1].tolist() == [2, 2]
    dataset = HDF5Dataset(path, fields="data")
    write([3, 2, 1])  # the same number of rows
    with pytest.raises(DataError, match=r"x\.h5 was replaced after it was opened, and (data|inputs) is not stored as before"):
        _ = dataset[1]


@pytest.mark.parametrize("mode", ["w", "r+", "a"])
def test_a_file_that_this_process_is_still_writing_is_refused(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    written(path, "map", 0)
    with h5py.File(path, mode) as file:
        rows = file.create_dataset("z", (1000, 4), "f4")
        for row in range(1000):
            rows[row] = row  # most are not in the file yet
        with pytest.raises(DataError, match=r"x\.h5 is being written: this process has it open for writing; close it first"):
            HDF5Dataset(path, fields="z")
        rows[3] = 7  # it is still open
    assert HDF5Dataset(path, fields="z")[3].tolist() == [7] * 4


def test_a_script_may_change_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    written(tmp_path / "x.h5", "map", 0)
    with h5py.File(tmp_path / "elsewhere" / "x.h5", "w") as file:
        file["x"] = np.arange(100, 104)
    monkeypatch.chdir(tmp_path)
    datasets = [HDF5Dataset("x.h5", fields="x"), HDF5Dataset(["x.h5"], fields="x"), HDF5Dataset("x*.h5", fields="x")]
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert [dataset[:].tolist() for dataset in datasets] == [[0, 1, 2, 3]] * 3


def test_a_virtual_dataset_whose_data_is_elsewhere_is_not_read_as_zeros(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with h5py.File(tmp_path / "there" / "data.h5", "w") as file:
        file["x"] = np.arange(1.0, 5.0)
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource("data.h5", "x", (4,))
    whole = tmp_path / "there" / "whole.h5"
    with h5py.File(whole, "w") as file:
        file.create_virtual_dataset("x", layout)
    assert HDF5Dataset(whole)[:]["x"].tolist() == [1, 2, 3, 4]
    with pytest.raises(
        DataError, match=r"whole\.h5: x is a virtual dataset, and its data is in data\.h5, which is not beside"
    ) as said:
        HDF5Dataset(whole, cache=tmp_path / "cache")
    assert str(said.value).startswith(str(whole))
    with pytest.raises(DataError, match="is a virtual dataset"):
        HDF5Dataset(f"file://{whole}")
