"""CRC-32 of each 8 MB of a dataset, stored in the file: /rankwise/crc32/<dataset>. HDF5 has no other check for contiguous rows.

sums = [crc32(piece) for piece in pieces(file, offset, length)]
verify("train.h5")                     # DataError if a byte is not what was written
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rankwise.errors import DataError
from rankwise.hdf5.layout import OURS, open_bytes, opened, stored
from rankwise.host.text import size

PIECE = 8 << 20
HOME = f"{OURS}/crc32"
OF_VALUES = f"{OURS}/crc32_of_values"
"""The same for small datasets, of their values: HDF5 may store these anywhere."""


def pieces(file: Any, offset: int, length: int) -> Iterator[bytes]:
    """The pieces of a part of a file, in order. The last may be shorter, and even shorter than the part if the file ends."""
    file.seek(offset)
    while length > 0:
        piece = file.read(min(PIECE, length))
        if not piece:
            return
        yield piece
        length -= len(piece)


def add(file: Any, name: str) -> None:
    """Store the checksums of a small dataset: texts, lengths."""
    file[f"{OF_VALUES}/{name}"] = np.array(_sums_of(_content(file[name])), "<u4")


def _content(dataset: Any) -> bytes:
    values = dataset[...]
    return b"\0".join(values.tolist()) if values.dtype == object else values.tobytes()


def _sums_of(content: bytes) -> list[int]:
    return [zlib.crc32(piece) for piece in pieces(io.BytesIO(content), 0, len(content))]


def verify(path: str) -> int:
    """Read everything that has checksums, and return the number of bytes. Raises DataError for corrupted data, with its dataset
    and place."""
    with opened(path) as file:
        known, small = _stored_in(file, HOME), _stored_in(file, OF_VALUES)
        places = {name: stored(file, path, name) for name in known}
        read = sum(_verify_small(file[name], path, sums.tolist()) for name, sums in small.items())
        read += sum(_verify_chunks(dataset, path) for dataset in _with_sums_of_hdf5(file))
    with open_bytes(path) as raw:
        for name, sums in known.items():
            place = places[name]
            if place.offset is None:
                continue
            for number, piece in enumerate(pieces(raw, place.offset, place.end - place.offset)):
                read += len(piece)
                if number >= len(sums) or zlib.crc32(piece) != sums[number]:
                    at = place.offset + number * PIECE
                    raise DataError(
                        f"{path} is corrupted: bytes {at} to {at + len(piece) - 1} of the file, {size(number * PIECE)} into "
                        f"{name}, are not those that were written; copy the file or create it again"
                    )
    return read


def _stored_in(file: Any, home: str) -> dict[str, npt.NDArray[np.uint32]]:
    """The checksums in this group, by the names of their datasets."""
    found: dict[str, npt.NDArray[np.uint32]] = {}
    if home in file:
        file[home].visititems(lambda name, item: found.update({name: item[...]} if hasattr(item, "shape") else {}))
    return found


def _verify_small(dataset: Any, path: str, sums: list[int]) -> int:
    content = _content(dataset)
    if _sums_of(content) != sums:
        raise DataError(
            f"{path} is corrupted: the values of {dataset.name[1:]} are not those that were written; copy the file or create "
            "it again"
        )
    return len(content)


def _with_sums_of_hdf5(file: Any) -> list[Any]:
    """The datasets in chunks of which HDF5 has a checksum, which it compares when it reads them."""
    found: list[Any] = []
    file.visititems(lambda name, item: found.append(item) if getattr(item, "fletcher32", False) else None)
    return found


def _verify_chunks(dataset: Any, path: str) -> int:
    for rows in dataset.iter_chunks():
        try:
            dataset[rows]
        except OSError as error:
            raise DataError(
                f"{path} is corrupted: {dataset.name[1:]} cannot be read from row {rows[0].start} on; copy the file or create "
                f"it again ({' '.join(str(error).split())})"
            ) from None
    return int(dataset.nbytes)
