"""CRC-32 of each 8 MB of a dataset, stored in the file: /rankwise/crc32/<dataset>. HDF5 has no other check for contiguous rows.

sums = [crc32(piece) for piece in pieces(file, offset, length)]
verify("train.h5")                     # DataError if a byte is not what was written
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from rankwise.errors import DataError
from rankwise.hdf5.layout import OURS, open_bytes, opened, stored
from rankwise.host.text import size

PIECE = 8 << 20
HOME = f"{OURS}/crc32"


def pieces(file: Any, offset: int, length: int) -> Iterator[bytes]:
    """The pieces of a part of a file, in order. The last may be shorter, and even shorter than the part if the file ends."""
    file.seek(offset)
    while length > 0:
        piece = file.read(min(PIECE, length))
        if not piece:
            return
        yield piece
        length -= len(piece)


def verify(path: str) -> int:
    """Read everything that has checksums, and return the number of bytes. Raises DataError for corrupted data, with its dataset
    and place."""
    with opened(path) as file:
        known: dict[str, Any] = {}
        if HOME in file:
            file[HOME].visititems(lambda name, item: known.update({name: item[...].tolist()} if hasattr(item, "shape") else {}))
        places = {name: stored(file, path, name) for name in known}
    read = 0
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
