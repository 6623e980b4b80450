"""Other programs and our files: Debian's h5dump prints what we write, RETURNN reads it, and we read what RETURNN writes."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rankwise.hdf5 import HDF5Dataset, HDF5Writer

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

SEQUENCES = [np.arange(6.0, dtype="f4").reshape(3, 2), np.zeros((0, 2), "f4"), np.ones((5, 2), "f4")]
TAGS = ["a", "b/ü", "c"]


@pytest.fixture(scope="module")
def h5dump() -> str:
    if shutil.which("h5dump") is None:
        words = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", "hdf5-tools"]
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if os.geteuid() or subprocess.run(words, capture_output=True, env=environ).returncode:
            subprocess.run(["apt-get", "-o", "DPkg::Lock::Timeout=300", "update"], capture_output=True)
            done = subprocess.run(words, capture_output=True, env=environ, text=True)
            assert done.returncode == 0, done.stderr
    return "h5dump"


@pytest.fixture(scope="module")
def returnn() -> Any:
    try:
        importlib.metadata.version("returnn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("returnn is not installed here; .ci/run installs it")
    from returnn.datasets import hdf
    from returnn.log import log

    log.initialize(verbosity=[1])
    return hdf


@pytest.mark.parametrize("ways", [{}, {"compress": "gzip"}, {"layout": "returnn"}], ids=["plain", "gzip", "returnn"])
def test_h5dump_prints_every_value(h5dump: str, tmp_path: Path, ways: dict[str, Any]) -> None:
    with HDF5Writer(tmp_path / "x.h5", **ways) as writer:
        for number, (sequence, tag) in enumerate(zip(SEQUENCES, TAGS, strict=True)):
            writer.add(data=sequence, classes=np.arange(number), odd=np.array([True, False]), half=np.ones(2, "f2"), tag=tag)
    done = subprocess.run([h5dump, str(tmp_path / "x.h5")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with h5py.File(tmp_path / "x.h5") as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        for name in names:
            assert f'DATASET "{name.rpartition("/")[2]}"' in done.stdout
    for value in ("TRUE", "FALSE", "4, 5", '"c'):
        assert value in done.stdout


def read_by_returnn(hdf: Any, path: Path) -> list[tuple[str, dict[str, Any]]]:
    dataset = hdf.HDFDataset(files=[str(path)])
    dataset.init_seq_order(epoch=1)
    dataset.load_seqs(0, dataset.num_seqs)
    keys = dataset.get_data_keys()
    return [(dataset.get_tag(k), {key: dataset.get_data(k, key) for key in keys}) for k in range(dataset.num_seqs)]


@pytest.mark.parametrize("with_targets", [True, False])
def test_returnn_reads_what_we_write(returnn: Any, tmp_path: Path, with_targets: bool) -> None:
    more = [{"classes": np.arange(k, dtype="i4"), "words": np.full(3, k, "i4")} if with_targets else {} for k in range(3)]
    with HDF5Writer(tmp_path / "x.hdf", layout="returnn", dims={"classes": 9, "words": 50}) as writer:
        for sequence, tag, targets in zip(SEQUENCES, TAGS, more, strict=True):
            writer.add(data=sequence, tag=tag, **targets)
    read = read_by_returnn(returnn, tmp_path / "x.hdf")
    assert [tag for tag, _ in read] == TAGS
    for (_, got), sequence, targets in zip(read, SEQUENCES, more, strict=True):
        assert got.keys() == {"data", *targets}
        assert np.array_equal(got["data"], sequence)
        assert all(np.array_equal(got[name], value) for name, value in targets.items())


def same(returnn: Any, path: Path) -> HDF5Dataset:
    """Our samples, which must be those that RETURNN reads."""
    dataset = HDF5Dataset(path)
    read = read_by_returnn(returnn, path)
    assert len(dataset) == len(read)
    for sample, (tag, data) in zip((dataset[k] for k in range(len(dataset))), read, strict=True):
        assert sample["tag"] == tag
        for name, value in data.items():
            if name in sample:
                mine = sample[name] if isinstance(sample[name], list) else sample[name].numpy()
                assert np.array_equal(np.reshape(mine, np.shape(value)), value), name
    return dataset


def test_we_read_what_simple_hdf_writer_writes(returnn: Any, tmp_path: Path) -> None:
    writer = returnn.SimpleHDFWriter(str(tmp_path / "dense.hdf"), dim=2)
    padded, lengths = np.zeros((3, 5, 2), "f4"), [len(sequence) for sequence in SEQUENCES]
    for to, sequence in zip(padded, SEQUENCES, strict=True):
        to[: len(sequence)] = sequence
    extra = {"classes": np.arange(12, dtype="i4").reshape(3, 4), "score": np.arange(3.0, dtype="f4")}
    writer.insert_batch(padded, lengths, TAGS, extra=extra)
    writer.close()
    assert same(returnn, tmp_path / "dense.hdf")[[0]]["classes"].tolist() == [[0, 1, 2, 3]]

    writer = returnn.SimpleHDFWriter(str(tmp_path / "sparse.hdf"), dim=40, ndim=1)
    writer.insert_batch(np.arange(15, dtype="i4").reshape(3, 5), [*lengths[:1], 2, 5], TAGS)
    writer.close()
    assert same(returnn, tmp_path / "sparse.hdf")[2]["data"].tolist() == [10, 11, 12, 13, 14]

    writer = returnn.SimpleHDFWriter(str(tmp_path / "axes.hdf"), dim=2, ndim=3)
    writer.insert_batch(np.arange(36.0, dtype="f4").reshape(3, 2, 3, 2), {0: [2, 1, 2], 1: [3, 3, 1]}, TAGS)
    writer.close()
    axes = HDF5Dataset(tmp_path / "axes.hdf")
    assert axes[2]["data"].tolist() == [[[24, 25]], [[30, 31]]]
    assert axes[[0, 1]]["data"].shape == (2, 2, 3, 2)

    texts = np.array(["x", "yy", "z"], object)
    writer = returnn.SimpleHDFWriter(str(tmp_path / "texts.hdf"), dim=2)
    writer.insert_batch(padded, lengths, TAGS, extra={"raw": texts[:, None]})
    writer.close()
    assert HDF5Dataset(tmp_path / "texts.hdf", fields="raw")[[0, 1, 2]] == [["x"], ["yy"], ["z"]]


def test_we_read_what_hdf_dataset_writer_writes(returnn: Any, tmp_path: Path) -> None:
    from returnn.datasets.generating import StaticDataset

    data = [{"data": s, "classes": np.arange(k + 1, dtype="i4")} for k, s in enumerate(SEQUENCES)]
    source = StaticDataset(data=data, output_dim={"data": (2, 2), "classes": (9, 1)})
    source.init_seq_order(epoch=1)
    writer = returnn.HDFDatasetWriter(str(tmp_path / "x.hdf"))
    writer.dump_from_dataset(source, use_progress_bar=False)
    writer.close()
    dataset = HDF5Dataset(tmp_path / "x.hdf")
    for k, sequence in enumerate(SEQUENCES):
        assert np.array_equal(dataset[k]["data"].numpy(), sequence)
        assert dataset[k]["classes"].tolist() == list(range(k + 1))
