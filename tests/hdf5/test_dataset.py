"""HDF5Dataset: the same bytes as h5py reads, from any layout of a file, for one sample or a batch, over several files."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from batches import loaders
from ranks import on_ranks, scripts_on_ranks
from torch.utils.data import DataLoader, Subset, random_split

import rankwise
from rankwise.data.kinds import reader_of
from rankwise.dist import log
from rankwise.errors import ConfigError, DataError
from rankwise.hdf5 import HDF5Dataset, HDF5Writer, rows
from rankwise.hdf5.rows import BlockRows, MappedRows
from rankwise.host import machine

N = 103
CHANCE = np.random.default_rng(0)
SHUFFLED = CHANCE.permutation(N)

STORED: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "in chunks": {"chunks": (7, 4, 5)},
    "chunks across the features": {"chunks": (16, 3, 2)},
    "gzip": {"chunks": (10, 4, 5), "compression": "gzip"},
    "lzf and shuffle": {"chunks": (10, 4, 5), "compression": "lzf", "shuffle": True},
    "fletcher32": {"chunks": (10, 4, 5), "fletcher32": True},
}
TYPES = [
    "uint8",
    "int16",
    "uint16",
    "int32",
    "int64",
    "uint32",
    "float16",
    "float32",
    "float64",
    "bool",
    ">f4",
    ">i8",
    "complex64",
]


def values(kind: str) -> Any:
    return (CHANCE.random((N, 4, 5)) * 200).astype(kind) if kind != "bool" else CHANCE.random((N, 4, 5)) > 0.5


def file_of(path: Path, **datasets: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, content in datasets.items():
            file[name] = content
    return path


def uneven(path: Path, samples: int = N, wide: int = 3) -> tuple[HDF5Dataset, list[Any]]:
    """Also has a sample and a batch without a row."""
    sequences = [np.full((0 if k % 5 == 0 else k % 11, wide), k, np.float32) for k in range(samples)]
    with HDF5Writer(path) as writer:
        for k, sequence in enumerate(sequences):
            writer.add(features=sequence, label=k)
    return HDF5Dataset(path), sequences


def padded(some: list[Any], pad: float = 0) -> Any:
    out = np.full((len(some), max(map(len, some)), *some[0].shape[1:]), pad, some[0].dtype)
    for to, sequence in zip(out, some, strict=True):
        to[: len(sequence)] = sequence
    return out


# --- rows


@pytest.mark.parametrize("how", STORED)
@pytest.mark.parametrize("kind", TYPES)
def test_a_batch_has_the_bytes_that_h5py_reads(tmp_path: Path, how: str, kind: str) -> None:
    x = values(kind)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=x, **STORED[how])
    dataset = HDF5Dataset(tmp_path / "x.h5", fields="x")
    batch = dataset.read_batch(SHUFFLED[:40])
    assert batch.dtype == torch.from_numpy(x[:0].astype(x.dtype.newbyteorder("="))).dtype
    assert np.array_equal(batch.numpy(), x[SHUFFLED[:40]])
    assert np.array_equal(dataset[7].numpy(), x[7])
    assert dataset.read_batch(SHUFFLED[:0]).shape == (0, 4, 5)


def test_what_lies_end_to_end_is_mapped_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["end to end"] = np.arange(5)
        file.create_dataset("in chunks", data=np.arange(5), chunks=(2,))
        file.create_dataset("never written", (5,), "i8", fillvalue=7)
    columns = HDF5Dataset(path)._columns
    kinds = {name: type(column._rows[0]) for name, column in columns.items()}  # type: ignore[attr-defined]
    assert kinds == {"end to end": MappedRows, "in chunks": BlockRows, "never written": BlockRows}
    assert HDF5Dataset(path)[4] == {"end to end": 4, "in chunks": 4, "never written": 7}


def test_a_batch_may_be_changed_and_the_file_stays(tmp_path: Path) -> None:
    dataset = HDF5Dataset(file_of(tmp_path / "x.h5", x=np.arange(10.0)), fields="x")
    dataset[[1, 2]].mul_(0)
    dataset[1].mul_(0)
    assert dataset[[1, 2]].tolist() == [1, 2]


def test_blocks_of_chunks_are_kept_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.hdf5.rows._KEPT_BYTES", 3 * 10 * 160)
    x = values("float64")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(10, 4, 5), compression="gzip")
    dataset = HDF5Dataset(tmp_path / "x.h5", fields="x")
    for _ in range(2):
        assert np.array_equal(dataset[SHUFFLED].numpy(), x[SHUFFLED])
    assert len(dataset._columns["x"]._rows[0]._kept) == 3  # type: ignore[attr-defined]
    several = HDF5Dataset([tmp_path / "x.h5"] + [shutil.copy(tmp_path / "x.h5", tmp_path / f"{n}.h5") for n in range(3)], "x")
    assert np.array_equal(several[np.arange(4 * N)].numpy(), np.tile(x, (4, 1, 1)))
    assert {len(rows._kept) for rows in several._columns["x"]._rows} == {3}, "for all files together"  # type: ignore[attr-defined]


@pytest.mark.parametrize("files", [1, 2])
def test_a_batch_is_made_in_the_memory_that_is_given(tmp_path: Path, files: int) -> None:
    for number in range(files):
        uneven(tmp_path / f"x{number}.h5")
    given = []

    def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        given.append(np.empty(shape, dtype))
        return given[-1]

    dataset = HDF5Dataset(tmp_path / "x*.h5", fields=["features", "label"])
    some = SHUFFLED[:20] + len(dataset) // 2 * (files - 1)
    for got, array, expected in zip(dataset.read_batch(some, empty), given, dataset.read_batch(some), strict=True):
        assert torch.equal(got, expected)
        assert got.data_ptr() == array.ctypes.data


# --- samples of uneven length


@pytest.mark.parametrize("wide", [3, 900], ids=["small rows, one gather", "large rows, copies"])
def test_sequences_are_padded_to_the_longest_of_the_batch(tmp_path: Path, wide: int) -> None:
    dataset, sequences = uneven(tmp_path / "x.h5", wide=wide)
    for some in (SHUFFLED[:20], SHUFFLED[20:21], np.array([0, 5, 10]), np.array([3, 3])):
        batch = dataset.read_batch(some)
        assert np.array_equal(batch["features"].numpy(), padded([sequences[k] for k in some]))
        assert batch["features_lengths"].tolist() == [len(sequences[k]) for k in some]
        assert batch["label"].tolist() == some.tolist()
    assert dataset[9]["features"].shape == (9, wide)
    assert dataset[0]["features"].shape == (0, wide)
    assert dataset.lengths.tolist() == list(map(len, sequences))


def test_padding_is_what_is_asked_for_by_field(tmp_path: Path) -> None:
    uneven(tmp_path / "x.h5")
    batch = HDF5Dataset(tmp_path / "x.h5", pad={"features": -1})[[4, 8]]
    assert batch["features"][0, 4:].unique().tolist() == [-1]
    assert HDF5Dataset(tmp_path / "x.h5", pad=2.5)[[4, 8]]["features"][0, 4:].unique().tolist() == [2.5]


@pytest.mark.parametrize(
    ("kind", "pad", "numbers"),
    [
        ("int64", float("nan"), "a whole number from -9223372036854775808 to 9223372036854775807"),
        ("int64", np.float64(2**63), "a whole number from -9223372036854775808 to 9223372036854775807"),
        ("int32", 1.5, "a whole number from -2147483648 to 2147483647"),
        (">i2", float("inf"), "a whole number from -32768 to 32767"),
        ("uint8", -1, "a whole number from 0 to 255"),
        ("bool", 2, "a whole number from 0 to 1"),
        ("float16", 1e5, "a number from -65504 to 65504"),
        ("float32", 10**400, "a number from -3.40282e+38 to 3.40282e+38"),
    ],
)
def test_padding_that_the_type_does_not_have_is_refused(tmp_path: Path, kind: str, pad: float, numbers: str) -> None:
    path = file_of(tmp_path / "x.h5", x=np.arange(3).astype(kind), n=[1, 2], even=np.zeros(2, "u1"))
    for given in (pad, {"x": pad}):
        with pytest.raises(
            ConfigError, match=f"pad is .* for x, but the type of this field is .*; give {numbers}".replace("+", "[+]")
        ):
            HDF5Dataset(path, lengths={"x": "n"}, pad=given)


@pytest.mark.parametrize(
    ("kind", "pad"),
    [
        ("int64", -100.0),
        ("int8", np.int8(-128)),
        ("float64", np.float16(1)),
        ("uint64", 2**64 - 1),
        ("bool", True),
        ("float16", float("-inf")),
        ("float32", float("nan")),
        ("float64", 0.1),
        ("complex64", 0.5),
    ],
)
def test_padding_that_the_type_has_is_in_batches_of_both_kinds(tmp_path: Path, kind: str, pad: float) -> None:
    path = file_of(tmp_path / "x.h5", x=np.ones(3).astype(kind), n=[1, 2], text=["a", "b"], even=np.zeros(2, "u1"))
    dataset = HDF5Dataset(path, fields=["x", "text", "even"], lengths={"x": "n"}, pad=pad)
    for batch in (dataset[:], dataset.collate([dataset[0], dataset[1]])):
        np.testing.assert_array_equal(batch[0].numpy(), np.array([[1, pad], [1, 1]], kind))


def test_padding_is_checked_for_a_field_of_even_length_only_if_it_is_named(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.h5", x=np.zeros(2, "u1"))
    assert HDF5Dataset(path, pad=-1)[:]["x"].tolist() == [0, 0]
    with pytest.raises(ConfigError, match="pad is -1 for x, but the type of this field is uint8"):
        HDF5Dataset(path, pad={"x": -1})


def test_lengths_may_be_any_dataset_of_the_file(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.h5", rows=np.arange(6.0), how_many=np.array([1, 0, 5], "u1"), label=np.arange(3))
    dataset = HDF5Dataset(path, lengths={"rows": "how_many"})
    assert dataset[[0, 1, 2]]["rows"].tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]]
    assert list(dataset[0]) == ["label", "rows", "rows_lengths"]


def test_nobody_can_change_the_lengths_that_say_where_samples_are(tmp_path: Path) -> None:
    for several in (False, True):
        paths = [file_of(tmp_path / f"{n}.h5", rows=np.arange(6.0), n=np.array([1, 0, 5])) for n in range(1 + several)]
        dataset = HDF5Dataset(paths, lengths={"rows": "n"})
        with pytest.raises(ValueError, match="read-only"):
            dataset.lengths[2] = 4
        assert dataset[2]["rows"].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("indices", [np.array([True, False, True]), [0.0, 1.7], [True, False], [[0, 1]]])
def test_a_subset_by_a_mask_or_by_fractions_is_an_error(tmp_path: Path, indices: Any) -> None:
    subset = Subset(HDF5Dataset(file_of(tmp_path / "x.h5", x=np.arange(3))), indices)
    with pytest.raises(DataError, match=r"^the Subset of HDF5Dataset has the indices .*; give whole numbers \(of a mask: np"):
        next(iter(rankwise.Loader(subset, global_batch_size=1, max_epochs=1)))


def test_without_lengths_there_is_no_such_attribute(tmp_path: Path) -> None:
    dataset = HDF5Dataset(file_of(tmp_path / "x.h5", x=np.arange(3)))
    assert not hasattr(dataset, "lengths")


# --- which fields, in which form


def test_fields_say_what_a_batch_is_made_of(tmp_path: Path) -> None:
    uneven(tmp_path / "x.h5")
    every = HDF5Dataset(tmp_path / "x.h5")[[1, 2]]
    assert list(every) == ["features", "features_lengths", "label"]
    label, lengths = HDF5Dataset(tmp_path / "x.h5", fields=["label", "features_lengths"])[[1, 2]]
    assert (label.tolist(), lengths.tolist()) == ([1, 2], [1, 2])
    assert HDF5Dataset(tmp_path / "x.h5", fields="label")[[1, 2]].tolist() == [1, 2]
    assert HDF5Dataset(tmp_path / "x.h5", fields=("label",))[1] == (1,)


@pytest.mark.parametrize("name", ["features", "/features", "./features", "//features/", "label/../features"])
def test_each_name_that_hdf5_has_for_a_field_means_the_same(tmp_path: Path, name: str) -> None:
    _, sequences = uneven(tmp_path / "x.h5")
    one = HDF5Dataset(tmp_path / "x.h5", name, pad={name: -1}, length_of=name)
    assert np.array_equal(one[[4, 8]].numpy(), padded([sequences[4], sequences[8]], -1))
    assert one.lengths.tolist() == list(map(len, sequences))
    features, lengths = HDF5Dataset(tmp_path / "x.h5", fields=[name, "/features_lengths"])[[4, 8]]
    assert (features.shape, lengths.tolist()) == ((2, 8, 3), [4, 8])
    path = file_of(tmp_path / "y.h5", features=np.arange(6.0), many=np.array([1, 0, 5]), label=np.arange(3))
    assert HDF5Dataset(path, lengths={name: "/many"})[:]["features_lengths"].tolist() == [1, 0, 5]


@pytest.mark.parametrize("names", [["features", "features_lengths"], ["features_lengths", "features"]])
def test_a_field_called_as_the_lengths_of_another_is_not_mixed_up_with_them(tmp_path: Path, names: list[str]) -> None:
    path = tmp_path / "x.h5"
    with HDF5Writer(path) as writer:
        for k in range(3):
            sample = {"features": np.zeros((k, 2)), "features_lengths": 100 + k}
            writer.add(**{name: sample[name] for name in names})
    with pytest.raises(ConfigError, match="features_lengths is a field of the file, and a batch has the lengths of features"):
        HDF5Dataset(path)
    batch = dict(zip(names, HDF5Dataset(path, fields=names)[:], strict=True))
    assert batch["features_lengths"].tolist() == [100, 101, 102]
    assert HDF5Dataset(path, fields="features_lengths")[2] == 102
    assert HDF5Dataset(path, fields=["features"]).lengths.tolist() == [0, 1, 2]


def test_lengths_that_the_user_wrote_too_may_be_the_lengths(tmp_path: Path) -> None:
    with HDF5Writer(tmp_path / "x.h5") as writer:
        for k in range(3):
            writer.add(features=np.zeros((k, 2)), features_lengths=k)
    batch = HDF5Dataset(tmp_path / "x.h5", lengths={"features": "features_lengths"})[:]
    assert {name: each.shape for name, each in batch.items()} == {"features": (3, 2, 2), "features_lengths": (3,)}
    assert batch["features_lengths"].tolist() == [0, 1, 2]


def test_lengths_may_have_a_field_that_is_not_read(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.h5", rows=np.arange(6.0), how_many=np.array([1, 0, 5]), label=np.arange(3))
    assert HDF5Dataset(path, fields="label", lengths={"rows": "how_many"})[2] == 2


def test_datasets_in_groups_and_others_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["deep/er/x"] = np.arange(4)
        file["y"] = np.arange(4)
        file["of another length"] = np.arange(9)
        file["alone"] = 3
    assert HDF5Dataset(path, fields=["deep/er/x", "y"])[3] == (3, 3)
    with pytest.raises(DataError, match="have different numbers of samples: of another length 9, y 4; give fields="):
        HDF5Dataset(path)


def test_strings_are_lists(tmp_path: Path) -> None:
    texts = ["a", "", "zwölf", "zwölf", "x/y"]
    path = file_of(tmp_path / "x.h5", free=texts, fixed=np.array([t.encode() for t in texts]), x=np.arange(5))
    batch = HDF5Dataset(path)[[2, 4]]
    assert batch["free"] == batch["fixed"] == ["zwölf", "x/y"]
    assert HDF5Dataset(path, fields="free")[1] == ""


@pytest.mark.parametrize("dtype", ["S9", "S300", "object"])
def test_a_string_is_decoded_when_it_is_asked_for(tmp_path: Path, dtype: str) -> None:
    texts = [b"a", "zw\u00f6lf".encode(), b"\xff\xfe", b"", b"b\0c", b"d"]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        kind = h5py.string_dtype() if dtype == "object" else dtype
        file.create_dataset(
            "pair",
            data=np.array(texts[:4] if dtype == "object" else [*texts[:4], texts[4], b"d"], dtype).reshape(-1, 2),
            dtype=kind,
        )
    dataset = HDF5Dataset(tmp_path / "x.h5", fields="pair")
    assert dataset[0] == ["a", "zw\u00f6lf"]
    if dtype != "object":
        assert dataset[[2, 0]] == [["b", "d"], ["a", "zw\u00f6lf"]]
    with pytest.raises(DataError, match=r"x\.h5: value 2 of pair is not UTF-8: b'\\xff\\xfe'$"):
        dataset[[0, 1]]


# --- indices


def test_indices_are_those_of_a_sequence(tmp_path: Path) -> None:
    dataset = HDF5Dataset(file_of(tmp_path / "x.h5", x=np.arange(5)), fields="x")
    assert len(dataset) == 5
    assert [dataset[-1].item(), dataset[np.int64(2)].item()] == [4, 2]
    assert dataset[1:4].tolist() == [1, 2, 3]
    assert dataset[torch.tensor([4, -5])].tolist() == [4, 0]
    assert dataset[[]].tolist() == []
    for wrong in (5, -6, [0, 5]):
        with pytest.raises(IndexError, match="not in a dataset of 5 samples"):
            dataset[wrong]


@pytest.mark.parametrize("one", [torch.tensor(3), np.array(3), np.array(-2, "i1"), np.uint64(3)])
def test_an_index_without_an_axis_is_one_sample(tmp_path: Path, one: Any) -> None:
    dataset = HDF5Dataset(file_of(tmp_path / "x.h5", x=np.arange(10).reshape(5, 2)), fields="x")
    assert dataset[one].tolist() == [6, 7]
    assert dataset[one.reshape(1)].tolist() == [[6, 7]]


def test_a_subset_by_a_tensor_gives_the_batches_of_torch(tmp_path: Path) -> None:
    dataset = HDF5Dataset(file_of(tmp_path / "x.h5", x=np.arange(10).reshape(5, 2)), fields="x")
    [batch] = DataLoader(Subset(dataset, torch.tensor([4, 2, 0])), batch_size=3)  # type: ignore[arg-type]
    assert batch.tolist() == [[8, 9], [4, 5], [0, 1]]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_bools_choose_samples(tmp_path: Path, kind: Callable[[Any], Any]) -> None:
    dataset = HDF5Dataset(file_of(tmp_path / "x.h5", x=np.arange(4)), fields="x")
    assert dataset[kind([False, False, True, True])].tolist() == [2, 3]
    assert dataset[kind([False] * 4)].tolist() == []
    for wrong, said in (([True, False, True], "3 bools"), ([[True] * 4], "1x4 bools")):
        with pytest.raises(IndexError, match=f"the index has {said}, but the dataset has 4 samples; give one per sample"):
            dataset[kind(wrong)]


@pytest.mark.parametrize(
    "wrong", [1.5, [0.9, 2.9], np.array(1.0), torch.tensor([1.0]), torch.tensor(1.0), None, "x", ["0"], [[0], [1, 2]], np.True_]
)
def test_an_index_that_is_no_integer_is_a_type_error(tmp_path: Path, wrong: Any) -> None:
    dataset = HDF5Dataset(file_of(tmp_path / "x.h5", x=np.arange(4)), fields="x")
    with pytest.raises(TypeError, match="the index of a sample must be an integer; got"):
        dataset[wrong]


@pytest.mark.parametrize("beyond", [2**63, 10**30, np.array([2**64 - 1], "u8")])
def test_an_index_that_int64_cannot_hold_is_out_of_range(tmp_path: Path, beyond: Any) -> None:
    with pytest.raises(IndexError, match="not in a dataset of 4 samples"):
        HDF5Dataset(file_of(tmp_path / "x.h5", x=np.arange(4)))[beyond]


def test_several_files_are_one_dataset_in_the_order_of_their_names(tmp_path: Path) -> None:
    whole: list[Any] = []
    for number, samples in enumerate((4, 1, 9)):
        _, sequences = uneven(tmp_path / f"x{number}.h5", samples)
        whole += sequences
    dataset = HDF5Dataset(tmp_path / "x*.h5")
    assert len(dataset) == 14
    some = np.array([13, 0, 4, 5, 3, 12])
    batch = dataset.read_batch(some)
    assert np.array_equal(batch["features"].numpy(), padded([whole[k] for k in some]))
    assert batch["label"].tolist() == [8, 0, 0, 0, 3, 7]
    assert np.array_equal(dataset[13]["features"].numpy(), whole[13])
    for wide in (3, 900):
        paths = []
        for number in range(2):
            uneven(tmp_path / f"{wide}-{number}.h5", 12, wide)
            paths.append(tmp_path / f"{wide}-{number}.h5")
        both, one = HDF5Dataset(paths), HDF5Dataset(paths[0])
        assert torch.equal(both[[11, 13, 2]]["features"][:, :1], one[[11, 1, 2]]["features"][:, :1])


def test_files_of_different_kinds_are_not_one_dataset(tmp_path: Path) -> None:
    paths = [file_of(tmp_path / "a.h5", x=np.arange(3)), file_of(tmp_path / "b.h5", x=np.arange(3.0))]
    with pytest.raises(DataError, match=r"x is int64 in .*a\.h5 and float64 in .*b\.h5; give files that have the same fields"):
        HDF5Dataset(paths)
    with pytest.raises(DataError, match=r"y is not there in .*a\.h5 and int64 in"):
        HDF5Dataset([paths[0], file_of(tmp_path / "c.h5", x=np.arange(3), y=np.arange(3))])


# --- processes


def open_files(folder: Path) -> int:
    return sum(1 for fd in os.listdir("/proc/self/fd") if _target(fd).startswith(str(folder)))


def _target(fd: str) -> str:
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return ""


@pytest.mark.parametrize("how", ["contiguous", "gzip"])
def test_nothing_is_open_before_a_sample_is_read_and_each_process_opens_its_own(tmp_path: Path, how: str) -> None:
    x = values("float32")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=x, **STORED[how])
    dataset = HDF5Dataset(tmp_path / "x.h5", fields="x")
    assert open_files(tmp_path) == 0
    assert np.array_equal(pickle.loads(pickle.dumps(dataset))[3].numpy(), x[3])
    before = dataset[5]
    assert open_files(tmp_path) == 1
    again = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 3000
    assert torch.equal(again[5], before)
    answers = on_ranks(2, read_by_workers, tmp_path / "x.h5")
    assert answers[0] == answers[1] == x.sum(axis=(1, 2)).tolist()


def read_by_workers(path: Path) -> list[float]:
    dataset = HDF5Dataset(path, fields="x")
    _ = dataset[0]  # opened here, before the workers are forked
    found = []
    for batch in DataLoader(dataset, batch_size=10, num_workers=2, collate_fn=dataset.collate):
        found += batch.numpy().sum(axis=(1, 2)).tolist()
    return found


# --- loaders


def test_a_plain_dataloader_takes_it_too(tmp_path: Path) -> None:
    dataset, sequences = uneven(tmp_path / "x.h5")
    batches = list(DataLoader(dataset, batch_size=16, collate_fn=dataset.collate))
    assert sum(len(batch["label"]) for batch in batches) == N
    assert np.array_equal(batches[1]["features"].numpy(), padded(sequences[16:32]))
    assert batches[1]["features_lengths"].tolist() == [len(s) for s in sequences[16:32]]
    even = HDF5Dataset(file_of(tmp_path / "even.h5", x=np.arange(10), y=np.arange(10)), fields=["x", "y"])
    assert [x.tolist() for x, y in DataLoader(even, batch_size=4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def seen(path: Path, workers: int, fields: Any) -> list[Any]:
    dataset = HDF5Dataset(path, fields=fields)
    loader = rankwise.Loader(dataset, global_batch_size=20, max_epochs=2, seed=3, num_workers=workers)
    return [[[some["features"].sum().item(), some["label"].tolist()] for some in step] for step in loader]


def test_ranks_and_workers_see_the_same_samples_in_the_same_order(tmp_path: Path) -> None:
    uneven(tmp_path / "x.h5")
    [alone] = on_ranks(1, seen, tmp_path / "x.h5", 0, None)
    assert sorted(k for step in alone[: len(alone) // 2] for batch in step for k in batch[1]) == list(range(N))
    for workers in (1, 4):
        assert on_ranks(1, seen, tmp_path / "x.h5", workers, None) == [alone]
    first, second = on_ranks(2, seen, tmp_path / "x.h5", 0, None)
    joined = [[k for batch in (*mine, *others) for k in batch[1]] for mine, others in zip(first, second, strict=True)]
    assert joined == [[k for batch in step for k in batch[1]] for step in alone]


def test_batches_by_length_use_its_lengths(tmp_path: Path) -> None:
    dataset, _ = uneven(tmp_path / "x.h5")
    loader = rankwise.Loader(dataset, batches=rankwise.LengthBatches(global_tokens=40), max_epochs=1)
    sizes = [batch["features"].shape[:2] for step in loader for batch in step]
    assert sum(count for count, _ in sizes) == N
    assert all(count * longest <= 40 for count, longest in sizes)


def test_a_random_split_is_padded_as_the_whole_is(tmp_path: Path) -> None:
    dataset, sequences = uneven(tmp_path / "x.h5")
    train, held_out = random_split(dataset, [90, 13], generator=torch.Generator().manual_seed(0))
    seen = []
    for part in (train, held_out):
        for step in rankwise.Loader(part, global_batch_size=16, max_epochs=1):
            for batch in step:
                seen += batch["label"].tolist()
                assert np.array_equal(batch["features"].numpy(), padded([sequences[k] for k in batch["label"].tolist()]))
    assert sorted(seen) == list(range(N))


def test_a_collate_function_gets_samples(tmp_path: Path) -> None:
    dataset, _ = uneven(tmp_path / "x.h5")
    loader = rankwise.Loader(
        dataset, global_batch_size=10, max_epochs=1, shuffle=False, collate_fn=lambda some: [s["label"].item() for s in some]
    )
    assert [k for step in loader for batch in step for k in batch] == list(range(N))


# --- arguments


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: HDF5Dataset(path, fields=["label", "label_lengths"]), "all samples of label have the same length"),
        (lambda path: HDF5Dataset(path, length_of="label"), "length_of='label': the fields with lengths are features"),
        (lambda path: HDF5Dataset(path, fields=["label", "features", "/label"]), "fields has label twice; give each name once"),
        (lambda path: HDF5Dataset(path, fields=["label", 1]), "give a field's name, or a list of names"),
        (
            lambda path: HDF5Dataset(path, lengths={"feature": "label"}),
            "lengths has the field 'feature', which is not in the file; there are features, label",
        ),
        (lambda path: HDF5Dataset(path, lengths={"features": 1}), 'give names by the fields\' names: {"features":'),
        (
            lambda path: HDF5Dataset(path, pad={"feature": 1}),
            "pad has the field 'feature', which this dataset does not read; its fields are features, label",
        ),
        (lambda path: HDF5Dataset([]), "give a path, a pattern"),
        (lambda path: HDF5Dataset(b"x.h5"), "give a path, a pattern"),
        (lambda path: HDF5Dataset([path, None]), "give a path, a pattern"),
        (lambda path: HDF5Dataset(path, pad="x"), "a number, or numbers by the fields' names"),
        (lambda path: HDF5Dataset(path, pad={"features": None}), "a number, or numbers by the fields' names"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path: Path, make: Callable[[Path], Any], said: str) -> None:
    uneven(tmp_path / "x.h5")
    with pytest.raises(ConfigError) as caught:
        make(tmp_path / "x.h5")
    assert said in str(caught.value)


# --- blocks


@pytest.mark.parametrize("width", [3, 1000])
@pytest.mark.parametrize("library", ["isal.isal_zlib", "zlib"])
def test_gzip_chunks_that_are_stored_plain_or_missing_are_read_too(
    tmp_path: Path, width: int, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankwise.hdf5.rows._fastest_zlib", lambda: import_module(library))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        x = file.create_dataset("x", (35, width), ">i4", chunks=(10, width), compression="gzip", fillvalue=7)
        x[:10] = np.arange(10 * width).reshape(10, width)
        x.id.write_direct_chunk((20, 0), np.arange(10 * width, dtype=">i4").tobytes(), filter_mask=1)
        expected = x[...]
    chosen = np.random.default_rng(0).permutation(35)
    found = HDF5Dataset(tmp_path / "x.h5", fields="x").read_batch(chosen)
    assert np.array_equal(found.numpy(), expected[chosen])
    assert {7, width} <= set(found.flatten().tolist())


@pytest.mark.parametrize("most", [None, 100])
def test_a_gzip_dataset_to_which_nothing_was_written_is_its_fill_value(tmp_path: Path, most: int | None) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", (35,), "i4", chunks=(10,), maxshape=(most,), compression="gzip", fillvalue=7)
    assert HDF5Dataset(tmp_path / "x.h5", fields="x")[:].tolist() == [7] * 35


def test_gzip_chunks_are_decompressed_by_isal_where_it_is_installed_and_else_by_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    find = rows._fastest_zlib.__wrapped__
    assert find().__name__ == "isal.isal_zlib"
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    assert find().__name__ == "zlib"


def decoded_blocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets the field's name for each block that is decoded."""
    decoded = []
    read = BlockRows._block

    def noted(self: BlockRows, number: int) -> Any:
        if (self._stored.file, number) not in self._kept:
            decoded.append(self._stored.name)
        return read(self, number)

    monkeypatch.setattr(BlockRows, "_block", noted)
    return decoded


def test_a_compressed_file_shuffled_in_blocks_is_decoded_once_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.hdf5.rows._KEPT_BYTES", 5 * 20 * 40)
    x = np.arange(1003 * 10.0).reshape(1003, 10).astype("f4")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(20, 10), compression="gzip")
        file["n"] = np.arange(1003)
    dataset = HDF5Dataset(tmp_path / "x.h5")
    assert dataset.blocks == (20, 5)
    decoded = decoded_blocks(monkeypatch)
    seen = []
    for step in rankwise.Loader(dataset, global_batch_size=32, max_epochs=1, shuffle="blocks"):
        for batch in step:
            assert np.array_equal(batch["x"].numpy(), x[batch["n"].numpy()])
            seen += batch["n"].tolist()
    assert sorted(seen) == list(range(1003))
    assert seen != sorted(seen)
    assert len(decoded) == 51
    decoded.clear()
    list(rankwise.Loader(dataset, global_batch_size=32, max_epochs=1))
    assert len(decoded) > 51 * 5


def test_blocks_are_those_of_the_field_that_needs_most_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.hdf5.rows._KEPT_BYTES", 4000)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, width, rows in (("x", 10, 20), ("mask", 5, 35), ("label", 1, 500)):
            file.create_dataset(name, data=np.zeros((1000, width), "f4"), chunks=(rows, width), compression="gzip")
    dataset = HDF5Dataset(tmp_path / "x.h5")
    assert dataset.blocks == (20, 3)  # 5 blocks of mask are kept, and 20 samples are in 1.5 of them
    assert HDF5Dataset(tmp_path / "x.h5", fields=["x", "label"]).blocks == (20, 5)
    decoded = decoded_blocks(monkeypatch)
    list(rankwise.Loader(dataset, global_batch_size=32, max_epochs=1, shuffle="blocks"))
    assert (decoded.count("x"), decoded.count("label")) == (50, 2)
    assert decoded.count("mask") < 85  # of 29: 50 x 1.5


def test_blocks_of_uneven_samples_begin_in_the_middle_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.hdf5.rows._KEPT_BYTES", 20 * 400)
    lengths = np.random.default_rng(0).integers(1, 20, 1000)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.zeros(lengths.sum(), "f4"), chunks=(100,), compression="gzip")
        file["n"] = lengths
    dataset = HDF5Dataset(tmp_path / "x.h5", lengths={"x": "n"}, fields="x")
    assert dataset.blocks == (10, 10)  # 20 chunks are kept
    decoded = decoded_blocks(monkeypatch)
    list(rankwise.Loader(dataset, global_batch_size=32, max_epochs=1, shuffle="blocks"))
    assert len(decoded) < 2.2 * lengths.sum() / 100


def test_each_chunk_of_several_files_is_decoded_once_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.hdf5.rows._KEPT_BYTES", 5 * 20 * 4)
    for number in range(5):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            samples = 0 if number == 2 else 101 + number
            file.create_dataset("x", data=np.zeros(samples, "f4"), chunks=(20,), maxshape=(None,), compression="gzip")
    dataset = HDF5Dataset(str(tmp_path / "*.h5"), fields="x")
    assert (dataset.blocks, dataset.block_starts) == ((20, 5), (0, 101, 203, 307))
    decoded = decoded_blocks(monkeypatch)
    list(rankwise.Loader(dataset, global_batch_size=1, max_epochs=1, shuffle="blocks"))
    assert len(decoded) == 4 * 6


def test_a_file_without_samples_does_not_set_the_blocks(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "none.h5", "w") as file:
        file["x"] = np.zeros((0, 16384), "f4")
    full = file_of(tmp_path / "x.h5", x=np.zeros((5, 16384), "f4"))
    dataset = HDF5Dataset([tmp_path / "none.h5", full])
    assert dataset.blocks == (1, 1024)
    assert dataset.faster_without_workers


def test_what_lies_end_to_end_is_read_in_blocks_of_64_kb(tmp_path: Path) -> None:
    assert HDF5Dataset(file_of(tmp_path / "x.h5", x=np.zeros((5000, 64), "u1"), y=np.zeros(5000))).blocks == (1024, 1024)
    dataset, _ = uneven(tmp_path / "y.h5")
    assert HDF5Dataset(tmp_path / "y.h5", fields="features").blocks[0] == int(65536 / (12 * dataset.lengths.mean()))


@pytest.mark.parametrize("is_advised", [True, False])
def test_workers_that_make_reading_slower_are_one_warning(
    tmp_path: Path, is_advised: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 1)
    monkeypatch.setattr(log, "_warned", set())
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(40), **({} if is_advised else {"compression": "gzip"}))
    data = HDF5Dataset(tmp_path / "x.h5", fields="x")
    (loader,) = loaders(Subset(data, range(5, 30)) if is_advised else data, 1, num_workers=2, max_epochs=2)
    assert len(list(loader)) == (10 if is_advised else 16)
    said = [line for line in capfd.readouterr().out.splitlines() if "num_workers" in line]
    advice = "num_workers=2: a batch of HDF5Dataset is read faster without loader workers; leave num_workers out"
    assert len(said) == 1
    assert (advice in said[0]) == is_advised


def test_twenty_thousand_strings_are_read_at_once(tmp_path: Path) -> None:
    with HDF5Writer(tmp_path / "tags.h5") as writer:
        for number in range(20_000):
            writer.add(tag=f"tag {number}")
    assert HDF5Dataset(tmp_path / "tags.h5")[:]["tag"][::9_999] == ["tag 0", "tag 9999", "tag 19998"]


def test_indices_of_a_subset_mean_what_they_mean_in_torch(tmp_path: Path) -> None:
    with HDF5Writer(tmp_path / "x.h5") as writer:
        for number in range(5):
            writer.add(x=np.float32(number))
    dataset = HDF5Dataset(tmp_path / "x.h5")
    nested = Subset(Subset(dataset, [3, -1, 0]), [-1, 1])
    [[[batch]]] = [list(loader) for loader in loaders(nested, 1, shuffle=False)]
    assert batch["x"].tolist() == [0, 4]
    with pytest.raises(DataError, match=r"^the Subset has the index 900, and its dataset \(HDF5Dataset\) has 5 samples$"):
        list(loaders(Subset(dataset, [3, 900]), 1)[0])


MANY = """
import resource, sys
from rankwise.hdf5 import HDF5Dataset

resource.setrlimit(resource.RLIMIT_NOFILE, (110, int(sys.argv[1])))
dataset = HDF5Dataset("many-*.h5")
print(dataset[:]["x"].sum().item())
"""


def test_a_dataset_may_have_more_files_than_a_process_may_open_at_first() -> None:
    for number in range(60):
        with HDF5Writer(f"many-{number}.h5") as writer:
            writer.add(x=np.float32(number), y=np.float32(0))
    Path("reads.py").write_text(MANY)
    [done] = scripts_on_ranks(1, "reads.py", "1024")
    assert (done.returncode, done.stdout) == (0, "1770.0\n"), done.stdout
    [done] = scripts_on_ranks(1, "reads.py", "110")
    assert done.stdout.endswith(".h5 cannot be read: at most 110 open files per process (ulimit -n)\n")


class Shifted(HDF5Dataset):
    """As a user augments samples: by its own way to read one."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + 1000


class ShiftedInOne(HDF5Dataset):
    def __getitems__(self, indices: Any) -> Any:
        return [sample + 1000 for sample in super().__getitems__(indices)]


class Described(HDF5Dataset):
    """A subclass that reads as its base does."""

    def __repr__(self) -> str:
        return "Described"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Shifted, ShiftedInOne])
def test_a_subclass_that_reads_samples_in_its_own_way_is_read_in_that_way(
    kind: type[HDF5Dataset], workers: int, tmp_path: Path
) -> None:
    with HDF5Writer(tmp_path / "x.h5") as writer:
        for y in range(4):
            writer.add(y=y)
    dataset = kind(tmp_path / "x.h5", fields="y")
    for data, expected in ((dataset, [1000, 1001, 1002, 1003]), (Subset(dataset, [3, 1]), [1003, 1001])):
        loader = rankwise.Loader(data, global_batch_size=4, shuffle=False, max_epochs=1, num_workers=workers)
        assert [batch.tolist() for [batch] in loader] == [expected]
        assert reader_of(data) is None
    assert reader_of(Described(tmp_path / "x.h5")) is not None
