"""Shuffled batches of 12 kB images, compared with other libraries' formats: LitData, MosaicML Streaming and WebDataset.

    python benchmarks/hdf5/peers.py [--rounds 7] [--folder /tmp/hdf5_bench]

The same 40,000 images and labels as C of bench.py, written by each library, in batches of 128, shuffled, in one process, from
the page cache. Every way runs once per round. The numbers are CPU seconds per batch. The versions are pinned here:

    pip install --no-deps litdata==0.2.76 mosaicml-streaming==0.13.0 webdataset==1.0.2
    pip install --no-deps boto3 botocore s3transfer jmespath obstore tifffile brotli braceexpand python-snappy cramjam zstd \\
        catalogue torchvision

A library that is not here, or has another version, is a row that says so. Streaming imports torchvision, but does not use it
here; without a build that fits torch, a package with the names that it imports will do.
"""

import argparse
import importlib.metadata
import os
import warnings
from pathlib import Path

import bench
import h5py
import numpy as np
import torch
from measure import median, ratios, rounds, spread
from torch.utils.data import DataLoader

import rankwise

SIZE = 128
VERSIONS = {"litdata": "0.2.76", "mosaicml-streaming": "0.13.0", "webdataset": "1.0.2"}
GOALS = {"litdata": 4, "mosaicml-streaming": 10, "webdataset": 10}
_data: dict = {}


def sample(number: int) -> dict:
    """Sample `number` for LitData's processes, which take only a function of a module."""
    if not _data:
        _data["x"], _data["y"] = (bench.mapped(Path(os.environ["IMAGES"]), name) for name in "xy")
    return {"x": np.array(_data["x"][number]), "y": int(_data["y"][number])}


def litdata(images: Path, folder: Path):
    for number, name in enumerate(("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER")):
        os.environ[name] = str(folder.parent / f"litdata-{number}")  # it clears these folders, by default all in TMPDIR
    import litdata

    if not folder.exists():
        os.environ["IMAGES"] = str(images)
        numbers = list(range(count(images)))
        litdata.optimize(sample, numbers, output_dir=str(folder), chunk_bytes="64MB", num_workers=1)
    data = litdata.StreamingDataset(str(folder), shuffle=True)
    loader = litdata.StreamingDataLoader(data, batch_size=SIZE, num_workers=0)
    return lambda: loader


def streaming(images: Path, folder: Path):
    import streaming

    if not folder.exists():
        with streaming.MDSWriter(out=str(folder), columns={"x": "ndarray:uint8:3,64,64", "y": "int"}) as writer:
            for number in range(count(images)):
                writer.write(in_memory(images, number))
    streaming.base.util.clean_stale_shared_memory()
    data = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=SIZE)
    loader = DataLoader(data, SIZE)
    return lambda: loader


def webdataset(images: Path, folder: Path):
    import webdataset

    if not folder.exists():
        folder.mkdir()
        with webdataset.ShardWriter(str(folder / "%04d.tar"), maxcount=4000, verbose=0) as writer:
            for number in range(count(images)):
                row = in_memory(images, number)
                writer.write({"__key__": f"{number:06d}", "x": row["x"].tobytes(), "cls": str(row["y"]).encode()})
    tars = sorted(map(str, folder.glob("*.tar")))
    data = webdataset.WebDataset(tars, shardshuffle=len(tars)).shuffle(1000).map(decoded)
    return lambda: DataLoader(data, SIZE)


def decoded(row: dict) -> tuple[torch.Tensor, int]:
    return torch.frombuffer(bytearray(row["x"]), dtype=torch.uint8).reshape(3, 64, 64), int(row["cls"])


def in_memory(images: Path, number: int) -> dict:
    os.environ["IMAGES"] = str(images)
    return sample(number)


def count(images: Path) -> int:
    with h5py.File(images) as file:
        return len(file["y"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/hdf5_bench"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    bench.write(args.folder)
    images = args.folder / "C.h5"
    data = rankwise.HDF5Dataset(images, fields=["x", "y"])
    ways = {
        "bare np.take on a map": (bench.Raw(images, SIZE), 200),
        "rankwise.Loader": (bench.loop(lambda: rankwise.Loader(data, global_batch_size=SIZE, max_epochs=99)), 200),
    }
    lines = []
    for (name, version), make in zip(VERSIONS.items(), (litdata, streaming, webdataset), strict=True):
        try:
            if (found := importlib.metadata.version(name)) != version:
                raise ImportError(f"its version is {found}")
            ways[f"{name} {version}"] = bench.loop(make(images, args.folder / name)), 30
        except ImportError as error:
            lines.append(f"| {name} {version} | not measured: {error} | |")
    called = {name: (lambda _, one=one, n=n: bench.timed(one, n)) for name, (one, n) in ways.items()}
    found = rounds(called, args.rounds, warm=1, rotate=True)
    print("| way | CPU us a batch | rate, / bare gather | ours / this |\n|---|---|---|---|")
    bare, ours = list(found.values())[:2]
    for name, seconds in found.items():
        goal = f", goal {GOALS[name.split()[0]]}" if name.split()[0] in GOALS else ""
        rate = spread(ratios(bare, seconds), 4)
        print(f"| {name} | {median(seconds) * 1e6:.0f} | {rate} | {spread(ratios(seconds, ours), 1)}{goal} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
