"""RETURNN's HDF files: every layout that its tools write, read as RETURNN reads it; and the files that we write for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from rankwise.errors import ConfigError, DataError
from rankwise.hdf5 import HDF5Dataset, HDF5Writer

LENGTHS = [3, 0, 5]
TAGS = ["a", "b/ü", ""]


def write(path: Path, targets: dict[str, Any] | None = None, inputs: Any = None, lengths: Any = None, **more: Any) -> Path:
    """Written manually, after RETURNN's own code: the columns are those of the inputs, then of the sorted targets."""
    with h5py.File(path, "w") as file:
        if inputs is not None:
            file["inputs"] = inputs
            file.attrs["inputPattSize"] = inputs.shape[1] if inputs.ndim > 1 else 40
        for name, content in (targets or {}).items():
            file[f"targets/data/{name}"] = content
            file.require_group("targets/size").attrs[name] = [content.shape[-1] if content.ndim > 1 else 9, content.ndim]
            file.require_group("targets/labels")
        file["seqLengths"] = np.array(lengths, "i4")
        file["seqTags"] = TAGS[: len(lengths)]
        for name, content in more.items():
            file[name] = content
    return path


def test_dense_inputs_and_several_targets(tmp_path: Path) -> None:
    features, classes, words = np.arange(16.0).reshape(8, 2), np.arange(8, dtype="i4"), np.arange(6, dtype="i4")
    columns = [[3, 3, 1], [0, 0, 2], [5, 5, 3]]
    path = write(tmp_path / "x.hdf", {"words": words, "classes": classes}, features, columns)
    dataset = HDF5Dataset(path)
    assert list(dataset[0]) == ["data", "data_lengths", "classes", "classes_lengths", "words", "words_lengths", "tag"]
    batch = dataset[[2, 1]]
    assert batch["data"].tolist() == [features[3:].tolist(), np.zeros((5, 2)).tolist()]
    assert batch["words"].tolist() == [[3, 4, 5], [1, 2, 0]]
    assert batch["words_lengths"].tolist() == [3, 2]
    assert batch["tag"] == ["", "b/ü"]
    assert dataset.lengths.tolist() == LENGTHS
    assert HDF5Dataset(path, length_of="words").lengths.tolist() == [1, 2, 3]


def test_sparse_inputs_with_the_column_of_targets_that_are_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf", None, np.arange(8), [[3, 0], [0, 0], [5, 0]], labels=np.zeros(0, "S5"), times=np.zeros(8))
    assert HDF5Dataset(path, fields=["data", "data_lengths"])[[0]][0].tolist() == [[0, 1, 2]]
    assert set(HDF5Dataset(path)[0]) == {"data", "data_lengths", "tag"}


def test_targets_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf", {"data": np.arange(8)}, None, [[n] for n in LENGTHS])
    assert HDF5Dataset(path, fields="data")[2].tolist() == [3, 4, 5, 6, 7]


def test_targets_alone_may_be_called_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf", {"sizes": np.arange(8), "words": np.arange(3)}, None, [[n, 1] for n in LENGTHS])
    dataset = HDF5Dataset(path)
    assert list(dataset[0]) == ["sizes", "sizes_lengths", "words", "words_lengths", "tag"]
    assert dataset[2]["sizes"].tolist() == [3, 4, 5, 6, 7]


def test_strings_as_targets(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf", {"raw": np.array([b"x", b"y", b"z"])}, np.arange(8), [[3, 1], [0, 0], [5, 2]])
    assert HDF5Dataset(path, fields="raw")[[0, 1, 2]] == [["x"], [], ["y", "z"]]


def test_lengths_with_one_axis_hold_for_every_key(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf", {"classes": np.arange(8)}, np.arange(8), LENGTHS)
    assert HDF5Dataset(path)[2]["classes"].tolist() == [3, 4, 5, 6, 7]


def test_two_axes_that_differ_come_back_as_two_axes(tmp_path: Path) -> None:
    sizes, columns = np.array([2, 1, 1, 2, 2, 2], "i4"), [[2, 2], [2, 2], [4, 2]]
    path = write(tmp_path / "x.hdf", {"sizes": sizes}, np.arange(24.0).reshape(8, 3), columns)
    dataset = HDF5Dataset(path)
    assert dataset[2]["data"].shape == (2, 2, 3)
    assert dataset[1]["data"].tolist() == [[[6, 7, 8], [9, 10, 11]]]
    batch = dataset[[0, 1]]
    assert batch["data"].shape == (2, 2, 2, 3)
    assert batch["data"][0].tolist() == [[[0, 1, 2], [0, 0, 0]], [[3, 4, 5], [0, 0, 0]]]
    assert batch["data_lengths"].tolist() == [[2, 1], [1, 2]]


def test_columns_in_the_wrong_order_are_found_by_their_sums(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.hdf", {"classes": np.arange(8), "cz": np.arange(6)}, np.arange(8), [[3, 1, 3], [0, 2, 0], [5, 3, 5]]
    )
    with pytest.raises(
        DataError, match=r"the columns of seqLengths are in the wrong order: classes has 8 rows and lengths for 6"
    ):
        HDF5Dataset(path)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ([[3], [0], [5]], "seqLengths has 1 columns for 2 datasets"),
        ([[3, 3], [0, 0], [5, 4]], "classes has 8 rows (targets/data/classes), but the lengths of its samples add up to 7"),
        ([[3, 3], [1, 0], [4, 5], [0, 0]], "have different numbers of samples"),
    ],
)
def test_files_that_do_not_hold_together_are_one_error(tmp_path: Path, columns: Any, said: str) -> None:
    path = write(tmp_path / "x.hdf", {"classes": np.arange(8)}, np.arange(8), columns)
    with pytest.raises(DataError) as caught:
        HDF5Dataset(path)
    assert said in str(caught.value)


def test_a_field_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf", {"classes": np.arange(8)}, np.arange(8), [[n, n] for n in LENGTHS])
    with pytest.raises(DataError, match="has no field words; the fields of this file of RETURNN are data, classes, tag"):
        HDF5Dataset(path, fields=["data", "words"])


def test_lengths_are_not_an_argument_for_them(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf", {"classes": np.arange(8)}, np.arange(8), [[n, n] for n in LENGTHS])
    with pytest.raises(ConfigError, match="a file of RETURNN has its own in seqLengths; remove lengths"):
        HDF5Dataset(path, lengths={"data": "seqLengths"})


def test_what_we_write_has_returnns_layout(tmp_path: Path) -> None:
    with HDF5Writer(tmp_path / "x.hdf", layout="returnn", dims={"classes": 7}) as writer:
        for number, tag in enumerate(TAGS):
            writer.add(data=torch.full((number, 2), float(number)), classes=np.arange(number + 1, dtype="i4"), tag=tag)
    with h5py.File(tmp_path / "x.hdf") as file:
        assert {name: file.attrs[name] for name in sorted(file.attrs)} == {
            "inputPattSize": 2, "numDims": 1, "numLabels": 2, "numSeqs": 3, "numTimesteps": 3,
        }  # fmt: skip
        assert file["seqLengths"][...].tolist() == [[0, 1], [1, 2], [2, 3]]
        assert file["seqLengths"].dtype == "int32"
        assert file["targets/size"].attrs["classes"].tolist() == [7, 1]
        assert file["inputs"].shape == (3, 2)
        assert [tag.decode() for tag in file["seqTags"][...]] == TAGS
        assert list(file["targets/labels"]) == []
    dataset = HDF5Dataset(tmp_path / "x.hdf")
    assert dataset[2]["classes"].tolist() == [0, 1, 2]
    assert dataset[[0, 1, 2]]["tag"] == TAGS


def test_each_sample_needs_a_tag_there(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="layout='returnn' needs tag="),
        HDF5Writer(tmp_path / "x.hdf", layout="returnn") as writer,
    ):
        writer.add(data=np.zeros(3))


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"data": np.zeros((4, 2)), "sizes": np.arange(3)}, "RETURNN reads a field `sizes` as the axes of `data`"),
        ({"sizes": np.arange(3)}, "give it another name"),
        ({}, "layout='returnn' needs a field besides tag="),
    ],
)
def test_samples_that_returnn_could_not_read_are_refused_at_once(tmp_path: Path, sample: dict[str, Any], said: str) -> None:
    writer = HDF5Writer(tmp_path / "x.hdf", layout="returnn")
    with pytest.raises(DataError) as caught:
        writer.add(tag="a", **sample)
    assert said in str(caught.value)
    writer.discard()
