"""HDF5Writer: the samples that are read back, the layout of the file, and that a file is complete or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from rankwise.errors import ConfigError, DataError
from rankwise.hdf5 import HDF5Dataset, HDF5Writer
from rankwise.hdf5 import writer as writer_module


def written(path: Path, samples: Iterable[dict[str, Any]], **ways: Any) -> HDF5Dataset:
    with HDF5Writer(path, **ways) as writer:
        for sample in samples:
            writer.add(**sample)
    return HDF5Dataset(path)


def before_close(*samples: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Samples of which `add` must refuse one: in `close` it would be too late, all samples would be lost."""
    yield from samples
    pytest.fail("add has refused no sample")


# --- samples that are read back


def test_numbers_tensors_arrays_and_strings_come_back(tmp_path: Path) -> None:
    sample = {
        "i": 3, "f": 0.5, "b": True, "t": torch.arange(6.0).view(2, 3), "u": np.array([1, 2], "u2"), "s": "zwölf",
        "h": torch.ones(2).half(), "list": [0.5, 2.5], "big": np.array([1.5], ">f8"),
    }  # fmt: skip
    got = written(tmp_path / "x.h5", [sample, sample])[1]
    assert {name: str(value.dtype) for name, value in got.items() if name != "s"} == {
        "i": "torch.int64", "f": "torch.float32", "b": "torch.bool", "t": "torch.float32", "u": "torch.uint16",
        "h": "torch.float16", "list": "torch.float32", "big": "torch.float64",
    }  # fmt: skip
    assert got["s"] == "zwölf"
    assert torch.equal(got["t"], sample["t"])
    assert [got["i"].item(), got["f"].item(), got["b"].item(), got["big"].item()] == [3, 0.5, True, 1.5]


def test_tensors_that_are_conjugate_or_negative_in_name_only_come_back(tmp_path: Path) -> None:
    wave = torch.tensor([1 + 2j, 3 - 4j]).conj()
    with HDF5Writer(tmp_path / "x.h5") as writer:
        writer.add(wave=wave, imaginary=wave.imag)
    sample = HDF5Dataset(tmp_path / "x.h5")[0]
    assert sample["wave"].tolist() == [1 - 2j, 3 + 4j]
    assert sample["imaginary"].tolist() == [-2, 4]


def test_numbers_of_numpy_keep_their_type_and_those_of_python_are_float32(tmp_path: Path) -> None:
    seconds = np.float64(1764170000.25)
    sample = {
        "scalar": seconds, "list": [seconds, 1.0], "arrays": [np.zeros(2)], "plain": 0.25, "pairs": [(0.25, 1), (2, True)],
        "tuple": (0.25, 1), "of numpy": (seconds, 1.0),
    }  # fmt: skip
    got = written(tmp_path / "x.h5", [sample])[0]
    assert {name: str(value.dtype) for name, value in got.items()} == {
        "scalar": "torch.float64", "list": "torch.float64", "arrays": "torch.float64", "plain": "torch.float32",
        "pairs": "torch.float32", "tuple": "torch.float32", "of numpy": "torch.float64",
    }  # fmt: skip
    assert [got["scalar"].item(), got["list"][0].item()] == [seconds, seconds]


@pytest.mark.parametrize("layout", ["plain", "returnn"])
def test_one_very_long_text_does_not_make_the_others_as_long(tmp_path: Path, layout: str) -> None:
    texts = [f"ü{number}" for number in range(5000)] + ["", "x" * 5_000_000]  # 25 GB, if all were as long
    dataset = written(tmp_path / "x.h5", [{"tag": text, "data": [1]} for text in texts], layout=layout)
    assert (tmp_path / "x.h5").stat().st_size < 7_000_000
    assert dataset[:]["tag"] == texts
    assert dataset[5000]["tag"] == ""
    assert dataset.verify() > 5002 * 8 + 5_000_000
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["tag" if layout == "plain" else "seqTags"].asstr()[4999] == "ü4999"


def test_samples_of_one_length_lie_as_they_are_and_others_end_to_end_with_lengths(tmp_path: Path) -> None:
    one = [{"x": np.zeros((4, 2)), "y": np.zeros(k)} for k in range(3)]
    written(tmp_path / "x.h5", one, variable=["x"]) and written(tmp_path / "z.h5", one)
    with h5py.File(tmp_path / "z.h5") as file:
        assert (file["x"].shape, file["y"].shape) == ((3, 4, 2), (3,))
        assert file["rankwise/lengths/y"][...].tolist() == [0, 1, 2]
        assert "x" not in file["rankwise/lengths"]
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["x"].shape == (12, 2)
        assert file["rankwise/lengths/x"][...].tolist() == [4, 4, 4]


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_rows_lie_end_to_end_on_whole_pages_unless_they_are_compressed(tmp_path: Path, compress: str | None) -> None:
    chance = np.random.default_rng(0)
    images = [chance.integers(0, 9, (3, 64, 64), "u1") for _ in range(50)]
    dataset = written(tmp_path / "x.h5", [{"image": image, "k": k} for k, image in enumerate(images)], compress=compress)
    assert np.array_equal(dataset[[7, 3]]["image"].numpy(), np.stack([images[7], images[3]]))
    with h5py.File(tmp_path / "x.h5") as file:
        offset = file["image"].id.get_offset()
        assert offset is None if compress else offset % 4096 == 0
        assert file["image"].compression == compress
    assert (tmp_path / "x.h5").stat().st_size < 50 * 3 * 64 * 64 * (0.6 if compress else 1.02)


def test_all_samples_may_be_empty(tmp_path: Path) -> None:
    dataset = written(tmp_path / "x.h5", [{"x": np.zeros((0, 3)), "k": 1}] * 2, variable=["x"])
    assert dataset[[0, 1]]["x"].shape == (2, 0, 3)
    assert written(tmp_path / "y.h5", [{"x": np.zeros((0, 3)), "k": 1}] * 2)[[0, 1]]["x"].shape == (2, 0, 3)


# --- checksums


def test_a_changed_byte_is_found_and_its_place_told(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    dataset = written(path, [{"x": np.full(1000, k, "i4"), "name": "n"} for k in range(5000)])
    assert dataset.verify() == 20_000_000 + 5000  # and the names
    with h5py.File(path) as file:
        at = file["x"].id.get_offset() + 9_000_000
    with path.open("r+b") as raw:
        raw.seek(at)
        raw.write(b"\xff")
    with pytest.raises(
        DataError, match=r"x\.h5 is corrupted: bytes \d+ to \d+ of the file, .* into x, are not those that were written"
    ):
        dataset.verify()


def change(file: Any, name: str) -> None:
    """Exchange the first two values of a dataset, as a fault of a disk or of another program would."""
    values = file[name][...]
    values[[0, 1]] = values[[1, 0]]
    file[name][...] = values


@pytest.mark.parametrize(
    ("layout", "name"),
    [("plain", "text"), ("plain", "rankwise/lengths/x"), ("returnn", "seqTags"), ("returnn", "seqLengths")],
)
def test_changed_texts_and_lengths_are_found_too(layout: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    text = "text" if layout == "plain" else "tag"
    field = "x" if layout == "plain" else "data"
    samples = [{field: np.full((k + 1, 2), k, "f4"), text: f"text {k}"} for k in range(5)]
    before = written(path, samples, layout=layout).verify()
    assert before > 15 * 2 * 4
    with h5py.File(path, "r+") as file:
        change(file, name)
    with pytest.raises(DataError, match=rf"x\.h5 is corrupted: the values of {name} are not those that were written; copy"):
        HDF5Dataset(path).verify()


def test_texts_of_different_lengths_have_a_checksum_too(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    assert written(path, [{"t": "a" * (1 if k else 1 << 21)} for k in range(20)]).verify() > 0
    with h5py.File(path, "r+") as file:
        assert file["t"].dtype == object
        change(file, "t")
    with pytest.raises(DataError, match="the values of t are not those that were written"):
        HDF5Dataset(path).verify()


def test_a_damaged_chunk_is_found_and_its_rows_told(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    rows = np.random.default_rng(0).integers(0, 9, (12_500, 64))
    assert written(path, [{"x": row} for row in rows], compress="gzip").verify() == rows.nbytes
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(1)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset + chunk.size // 2)
        raw.write(b"\xff\x00\xff")
    with pytest.raises(DataError, match=rf"x is corrupted|x cannot be read from row {chunk.chunk_offset[0]} on; copy the file"):
        HDF5Dataset(path).verify()


def test_a_file_that_others_wrote_has_nothing_to_verify(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(3)
    assert HDF5Dataset(tmp_path / "x.h5").verify() == 0


def test_an_empty_list_has_numbers_of_the_type_that_its_field_has(tmp_path: Path) -> None:
    got = written(tmp_path / "x.h5", [{"n": [1, 2], "t": (0.5,)}, {"n": [], "t": ()}, {"n": [3], "t": [1.5]}])
    assert [(sample["n"].tolist(), sample["t"].tolist()) for sample in got] == [([1, 2], [0.5]), ([], []), ([3], [1.5])]
    assert got[1]["n"].dtype == torch.int64


# --- complete or absent


def test_an_exception_a_discard_and_no_sample_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        written(tmp_path / "x.h5", ({"x": 1 / (3 - k)} for k in range(9)))
    with pytest.raises(DataError, match="no sample was added"), HDF5Writer(tmp_path / "x.h5"):
        pass
    HDF5Writer(tmp_path / "x.h5").discard()
    assert list(tmp_path.iterdir()) == []


def test_a_sample_that_an_interrupt_has_cut_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = writer_module._Spool.add
    calls = []

    def interrupted(spool: Any, value: Any) -> None:
        add(spool, value)
        calls.append(spool.name)
        if len(calls) == 8:  # the second of three fields of the third sample
            raise KeyboardInterrupt

    monkeypatch.setattr(writer_module._Spool, "add", interrupted)
    with HDF5Writer(tmp_path / "x.h5") as writer:
        with contextlib.suppress(KeyboardInterrupt):
            for number in range(10):
                writer.add(x=np.full(1 + number, number), tag=str(number), y=number)
        writer.add(x=np.full(5, 9), tag="9", y=9)
    dataset = HDF5Dataset(tmp_path / "x.h5")
    assert [sample["x"].tolist() for sample in map(dataset.__getitem__, range(3))] == [[0], [1, 1], [9] * 5]
    assert (dataset[:]["tag"], dataset[:]["y"].tolist()) == (["0", "1", "9"], [0, 1, 9])


def test_a_file_that_is_there_is_kept_unless_it_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    written(path, [{"x": 1}])
    with pytest.raises(ConfigError, match=r"x\.h5 exists already; choose another name, or replace it with overwrite=True"):
        HDF5Writer(path)
    with pytest.raises(ZeroDivisionError), HDF5Writer(path, overwrite=True) as writer:
        writer.add(x=1 / 0)
    assert HDF5Dataset(path)[0]["x"] == 1
    assert written(path, [{"x": 2}], overwrite=True)[0]["x"] == 2


@pytest.mark.parametrize("has_links", [True, False])
def test_the_first_of_two_writers_of_one_file_is_not_replaced(
    tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "x.h5"
    writers = [HDF5Writer(path), HDF5Writer(path)]
    for number, writer in enumerate(writers):
        writer.add(x=number)
    writers[0].close()
    with pytest.raises(ConfigError, match=r"x\.h5 exists already; choose another name, or replace it with overwrite=True"):
        writers[1].close()
    assert HDF5Dataset(path)[0]["x"] == 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_that_was_made_although_the_answer_was_lost_is_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    assert written(tmp_path / "x.h5", [{"x": 1}])[0]["x"] == 1


def test_a_link_that_leads_nowhere_is_found_before_samples_are_added(tmp_path: Path) -> None:
    (tmp_path / "x.h5").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="exists already"):
        HDF5Writer(tmp_path / "x.h5")
    assert written(tmp_path / "x.h5", [{"x": 2}], overwrite=True)[0]["x"] == 2


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_is_refused_before_samples_are_added(tmp_path: Path, overwrite: bool) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path} is a folder; give the name of a file in it: {tmp_path}/train\.h5"):
        HDF5Writer(tmp_path, overwrite=overwrite)


def test_a_relative_path_remains_that_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    with HDF5Writer("x.h5") as writer:
        writer.add(x=1)
        monkeypatch.chdir("elsewhere")
        writer.add(x=2)
    assert HDF5Dataset(tmp_path / "x.h5")[:]["x"].tolist() == [1, 2]
    with pytest.raises(ConfigError, match=r"^\.\./x\.h5 exists already"):  # as it was typed
        HDF5Writer("../x.h5")


KILLED = """
import sys, os, numpy as np
from rankwise.hdf5 import HDF5Writer
writer = HDF5Writer(sys.argv[1], overwrite=True)
for k in range(10**9):
    writer.add(x=np.full(1000, k))
    if k == 100:
        print("writing", flush=True)
"""


def test_a_killed_writer_leaves_the_old_file_and_what_it_left_goes_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    written(path, [{"x": np.zeros(2)}])
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert HDF5Dataset(path)[0]["x"].tolist() == [0, 0]
    written(path, [{"x": np.ones(2)}], overwrite=True)
    assert list(tmp_path.iterdir()) == [path]
    assert HDF5Dataset(path)[0]["x"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["x.h5", "d[1].h5", "ü+*.h5"])
def test_only_folders_of_killed_writers_of_this_host_and_file_are_removed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", lambda: "node")
    killed = subprocess.Popen(["true"])
    killed.wait()
    own = f".{name}.writing-node-{killed.pid}-0a1b2c"
    others = [
        f".{name}.writing-node-1-{killed.pid}-0a1b2c",  # of host node-1: here nobody knows whether it runs
        f".{name}.writing-node-{os.getpid()}-0a1b2c",
        f".y{name}.writing-node-{killed.pid}-0a1b2c",
    ]
    for folder in (own, *others):
        (tmp_path / folder).mkdir()
    HDF5Writer(tmp_path / name).discard()
    assert {path.name for path in tmp_path.iterdir()} == {*others}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("a small disk needs the right to mount")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_one_error_and_leaves_nothing(small_disk: Path) -> None:
    for size in (1_200_000, 3_000_000):  # no space for it twice; no space for it at all
        with pytest.raises(DataError, match=r"cannot be written: (it needs 1\.2 MB, but only .* are free|No space left)"):
            written(small_disk / "x.h5", [{"x": np.zeros(size // 4, "i4")}] * 1)
        assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize(
    ("samples", "content"),
    [
        (2000, {"a": np.zeros(1000, "u1"), "b": np.zeros(1000, "u1")}),  # full in add
        (1046, {"a": np.zeros(2000, "u1"), "b": np.zeros(4, "u1")}),  # full in close, when the buffers are written
        (3000, {"a": "x" * 1000}),  # full when the file is written
    ],
)
def test_a_full_disk_is_one_error_although_data_is_still_buffered(
    small_disk: Path, samples: int, content: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=r"x\.h5 cannot be written: No space left on device$"):
        written(small_disk / "x.h5", [content] * samples)
    assert list(small_disk.iterdir()) == []


@contextlib.contextmanager
def open_files(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_fields_than_open_files_are_one_error(tmp_path: Path) -> None:
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 100
    said = rf"samples have {limit} fields, each needs an open file, but at most {limit} open files per process"
    with open_files(limit), pytest.raises(DataError, match=said):
        written(tmp_path / "x.h5", before_close({f"f{number}": number for number in range(limit)}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("free", [0, 1])
def test_without_free_file_descriptors_nothing_is_left_on_the_disk(tmp_path: Path, free: int) -> None:
    writer = HDF5Writer(tmp_path / "x.h5")
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 2
    with open_files(limit), contextlib.ExitStack() as files:
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(files.enter_context(open(os.devnull, "rb")))
        for file in taken[:free]:
            file.close()
        with pytest.raises(DataError, match="each needs an open file"):
            writer.add(a=1, b=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_a_writer_that_takes_a_sample_has_the_files_that_it_needs_to_close(tmp_path: Path, compress: str | None) -> None:
    in_use = list(map(int, os.listdir("/proc/self/fd")))
    limit, taken = max(in_use) + 30, 0
    for fields in range(limit - len(in_use) - 20, limit - len(in_use) + 5):
        with open_files(limit):
            writer = HDF5Writer(tmp_path / f"{fields}.h5", compress=compress)
            try:
                writer.add(**{f"f{number}": np.float32(number) for number in range(fields)})
            except DataError:
                continue
            writer.close()
            taken += 1
    assert 0 < taken < 20
    assert len(list(tmp_path.iterdir())) == taken


# --- samples that do not fit


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))},
         "sample 1 does not fit the samples before: x is 2 x 4 of float64, but was any x 3 of"),
        ({"x": np.zeros(3)}, {"x": np.zeros(3, "f4")}, "x is 3 of float32"),
        ({"x": 1}, {"x": np.zeros(3)}, "x is 3 of float64, but was a single value of int64"),
        ({"x": np.zeros(3)}, {"x": 2.0}, "x is a single value of float32"),
        ({"x": 1}, {"y": 1}, "sample 1 does not have the same fields as the samples before: x, y"),
        ({"x": "a"}, {"x": 1}, "x is a single value of int64"),
        ({}, {}, "a sample needs at least one field"),
        ({"a/b": 1}, {}, "a field cannot be called 'a/b'"),
        ({"x": torch.zeros(2, dtype=torch.bfloat16)}, {}, "bfloat16, which HDF5 does not have"),
        ({"x": object()}, {}, "sample 0 cannot be stored: x is of object; give numbers, bool, or a str"),
        ({"x": 1}, {"x": None}, "sample 1 cannot be stored: x is of object; give numbers, bool, or a str"),
        ({"x": [[1, 2], [3]]}, {}, "sample 0 cannot be stored: x cannot be converted to a numpy array (setting an array"),
        ({"x": torch.eye(2).to_sparse()}, {}, "x cannot be converted to a numpy array (can't convert Sparse layout"),
        ({"x": torch.ones(2, dtype=torch.float8_e4m3fn)}, {}, "x cannot be converted to a numpy array (Got unsupported"),
        ({"x": "ab"}, {"x": "ab\0cd"},
         r"sample 1 cannot be stored: x is 'ab\x00cd', which has a NUL character, where HDF5 would cut it off; remove"),
        ({"x": os.fsdecode(b"caf\xe9")}, {}, r"sample 0 cannot be stored: x is 'caf\udce9', which is not valid Unicode"),
        ({f"f{number}": 1 for number in range(4500)}, {}, "a sample has 4500 fields, but at most 4000 fit; use arrays"),
        ({"": 1}, {}, "a field cannot be called ''"),
        ({"a\0": 1}, {}, r"a field cannot be called 'a\x00'"),
        ({"\udce9": 1}, {}, r"a field cannot be called '\udce9'"),
    ],
)  # fmt: skip
def test_samples_that_do_not_fit_are_refused(tmp_path: Path, first: Any, second: Any, said: str) -> None:
    with pytest.raises(DataError) as caught:
        written(tmp_path / "x.h5", before_close(first, second))
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: HDF5Writer(path, layout="returnn", compress="gzip"), "written without compression"),
        (lambda path: HDF5Writer(path, compress="lz4"), "compress='lz4'"),
        (lambda path: written(path, [{"x": 1}], variable=["y"]), "variable has y, which samples do not have"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path: Path, make: Callable[[Path], Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tmp_path / "x.h5")
    assert said in str(caught.value)


def test_a_folder_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.h5 cannot be written: No such file or directory"):
        HDF5Writer(tmp_path / "no" / "x.h5")


def test_a_closed_writer_takes_nothing_more(tmp_path: Path) -> None:
    with HDF5Writer(tmp_path / "x.h5") as writer:
        writer.add(x=1)
    with pytest.raises(ConfigError, match="is closed"):
        writer.add(x=2)


@pytest.mark.parametrize(
    "names", [("inputs", "seqLengths"), ("inputs", "seqLengths", "seqTags"), ("streams", "seq_names")], ids=" ".join
)
def test_fields_may_have_the_names_of_datasets_of_returnn(names: tuple[str, ...], tmp_path: Path) -> None:
    samples = [{name: np.arange(k, k + 2) for name in names} for k in range(3)]
    dataset = written(tmp_path / "x.h5", samples)
    assert list(dataset[0]) == list(names)
    assert dataset[2][names[0]].tolist() == [2, 3]


@pytest.mark.parametrize("end", ["close", "discard"])
def test_a_writer_may_be_closed_within_its_block(end: str, tmp_path: Path) -> None:
    with HDF5Writer(tmp_path / "x.h5") as writer:
        writer.add(x=1)
        getattr(writer, end)()
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"] * (end == "close")
