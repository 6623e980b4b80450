"""RETURNN's layout of an HDF5 file (its HDFDataset, SimpleHDFWriter and hdf_dump): which dataset is which field.

    /inputs  /targets/data/KEY  /targets/size (attributes)  /seqLengths (samples x keys)  /seqTags

The fields are `data` (the inputs), the targets by their keys, and `tag`. The number of rows per sample of each field but `tag`
is in its column of seqLengths: first the inputs, then the targets in the order of their sorted keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rankwise.errors import DataError
from rankwise.hdf5.layout import Field, Lengths, LengthsAt, Stored, bases, stored
from rankwise.host.text import listed

INPUTS, TAG, SIZES = "data", "tag", "sizes"
LENGTHS = "seqLengths"


def is_one(file: Any) -> bool:
    """Whether this is a file of RETURNN. Raises DataError for RETURNN's other kind of files."""
    if "seq_names" in file and "streams" in file:
        raise DataError(
            f"{file.filename} is a file of RETURNN's NextGenHDFDataset (a dataset per sequence), which cannot be read; write "
            "it again with rankwise.hdf5.HDF5Writer, or with RETURNN as an HDFDataset"
        )
    return LENGTHS in file and ("inputs" in file or "targets/data" in file)


def fields_of(file: Any, path: str, fields: Sequence[str] | None) -> dict[str, Field]:
    keys = [INPUTS] if "inputs" in file else []
    if "targets" in file:
        sizes = file["targets/size"].attrs if "targets/size" in file else {}
        keys += sorted({*file["targets/data"], *sizes})
    homes = {key: "inputs" if key == INPUTS and "inputs" in file else f"targets/data/{key}" for key in keys}
    tags = [TAG] if "seqTags" in file and TAG not in homes else []
    known = [*homes, *tags]
    asked = bases(fields, known.__contains__) if fields is not None else None
    _check_known(path, asked, known)
    table: npt.NDArray[Any] = file[LENGTHS][...]
    columns, lengths = _columns(table, path, len(keys), "targets" in file), LengthsAt.of(table, LENGTHS)
    found = {
        key: Field.with_lengths(replace(stored(file, path, home), lengths=lengths), columns[:, at])
        for at, (key, home) in enumerate(homes.items())
    }
    _check_columns(path, found)
    are_axes = SIZES in found and INPUTS in found
    if are_axes:
        found[INPUTS] = replace(found[INPUTS], axes=_axes(found[SIZES]))
    if tags:
        found[TAG] = Field(stored(file, path, "seqTags"))
    names = asked if asked is not None else [name for name in found if name != SIZES or not are_axes]
    return {name: found[name] for name in names}


def _check_known(path: str, fields: Sequence[str] | None, known: Sequence[str]) -> None:
    if unknown := [name for name in fields or () if name not in known]:
        raise DataError(f"{path} has no field {unknown[0]}; the fields of this file of RETURNN are {listed(known)}")


def _columns(lengths: npt.NDArray[Any], path: str, keys: int, has_targets: bool) -> npt.NDArray[Any]:
    if lengths.ndim == 1:  # older files may have this: one length for all fields
        return np.repeat(lengths[:, None], keys, axis=1)
    width = lengths.shape[1]
    is_dummy = not has_targets and width == keys + 1  # a column for `classes`, although there are no targets
    if width != keys and not is_dummy:
        raise DataError(f"{path}: seqLengths has {width} columns for {keys} datasets: the file is inconsistent; write it again")
    return lengths


def _check_columns(path: str, found: dict[str, Field]) -> None:
    """hdf_dump may sort its columns by other names than readers do; the sums of the columns show whether it did."""
    rows = {key: field.stored.shape[0] for key, field in found.items()}
    sums = {key: field.total for key, field in found.items()}
    wrong = [key for key in found if rows[key] != sums[key]]
    if len(wrong) > 1 and sorted(rows[key] for key in wrong) == sorted(sums[key] for key in wrong):
        raise DataError(
            f"{path}: the columns of seqLengths are in the wrong order: "
            f"{listed(f'{key} has {rows[key]} rows and lengths for {sums[key]}' for key in wrong)}; readers sort targets "
            "by name: write the file again with sorted names"
        )


def _axes(sizes: Field) -> tuple[Stored, Lengths]:
    assert sizes.lengths is not None
    return sizes.stored, sizes.lengths
