"""A message that is written into a buffer comes out as from torch's own queue; what cannot be in a buffer is refused."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from rankwise.data.laying import CannotLieThereError, Laying, loads
from rankwise.data.ring import _plain


class Named(NamedTuple):
    x: torch.Tensor
    y: Any


def over(message: Any, size: int = 1 << 16) -> Any:
    buffer = bytearray(size)
    return loads(Laying(buffer).pickled(message), buffer)


TENSORS = {
    "a matrix": torch.arange(12.0).reshape(3, 4),
    "a scalar": torch.tensor(3),
    "empty": torch.ones(2, 0, 3, dtype=torch.float16),
    "transposed": torch.arange(12).reshape(3, 4).T,
    "links last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.arange(3).reshape(3, 1).expand(3, 5),
    "without its last column": torch.arange(12).reshape(3, 4)[:, :-1],
    "of every second row": torch.arange(100).reshape(20, 5)[3:13:2],
    "a few rows of many": torch.arange(3000).reshape(1000, 3)[500:503],
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "complex": torch.ones(3, dtype=torch.complex64) * 1j,
    "conjugate": (torch.ones(3, dtype=torch.complex64) * 1j).conj(),
    "uint64": torch.tensor([2**63], dtype=torch.uint64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_keeps_its_values_type_and_strides(name: str) -> None:
    given = TENSORS[name]
    for got in (over((7, given))[1], over({"x": [given]})["x"][0], over(Named(given, "y")).x):
        assert type(got) is torch.Tensor
        assert got.dtype == given.dtype
        assert got.stride() == given.stride()
        assert torch.equal(got, given)
        assert got._base is None
        assert not got.requires_grad


@pytest.mark.parametrize(
    "given",
    [
        np.arange(1000.0),
        np.arange(3),
        np.arange(2000, dtype=">i4").reshape(40, 50),
        np.asfortranarray(np.arange(2000).reshape(40, 50)),
        np.array(["a", "bc"] * 500),
        np.array(["2026-11-25"] * 500, "datetime64[D]"),
        np.array([{}, None] * 500, dtype=object),
        np.zeros(500, [("x", "f4"), ("y", "i8")]),
    ],
    ids=lambda given: f"{given.dtype.str} {given.nbytes}",
)
def test_an_array_keeps_its_values_and_type(given: Any) -> None:
    got = over((7, given))[1]
    assert got.dtype == given.dtype
    assert got.strides == given.strides
    assert got.flags.writeable
    np.testing.assert_array_equal(got, given)


def test_what_is_no_tensor_is_in_the_pickle() -> None:
    message = (3, Named(torch.ones(2), {"names": ["a", "b"], "none": None, "flag": True, "set": {1}, "raw": b"\0"}))
    got = over(message)
    assert type(got[1]) is Named
    assert got[1].y == message[1].y


def test_tensors_that_share_memory_share_it_afterwards() -> None:
    tokens = torch.arange(20).reshape(4, 5)
    other = torch.ones(2)
    inputs, labels, same, again = over([tokens[:, :-1], tokens[:, 1:], other, other])
    inputs[0, 1] = 99
    assert labels[0, 0] == 99
    assert same is again
    one, two, three = over([tokens, tokens.reshape(-1), torch.ones(2)])
    one.zero_()
    assert not two.any()
    assert three.all()


def test_small_parts_of_a_large_tensor_keep_their_own_values() -> None:
    many = torch.arange(100_000)
    given = [many[50:60], many[:10], many[70:75], many[50:55], many[55:60]]
    for got, expected in zip(over(given), given, strict=True):
        assert got.tolist() == expected.tolist()


def test_a_batch_that_was_made_in_the_buffer_is_not_copied() -> None:
    buffer = bytearray(1 << 16)
    laying = Laying(buffer)
    array = laying.empty((10, 100), np.dtype("float32"))
    array[:] = 7
    end = laying.end
    tensor = torch.from_numpy(array)
    got, part = loads(laying.pickled([tensor, tensor[2:, 3:]]), buffer)
    assert laying.end == end == array.nbytes
    assert torch.equal(got, tensor)
    assert torch.equal(part, tensor[2:, 3:])
    array[3, 4] = 8
    assert got[3, 4] == part[1, 1] == 8


@pytest.mark.parametrize(("shape", "dtype"), [((0, 3), "f4"), ((10, 2000), "f8"), ((3,), "O")])
def test_what_has_no_room_in_the_buffer_is_made_elsewhere(shape: tuple[int, ...], dtype: str) -> None:
    laying = Laying(bytearray(1 << 16))
    assert laying.empty(shape, np.dtype(dtype)).shape == shape
    assert laying.end == 0


def test_a_conjugate_and_a_negative_tensor_arrive_with_their_values_also_beside_what_cannot_lie_there() -> None:
    signal = torch.fft.fft(torch.arange(8.0))
    given = [signal.conj(), signal.conj().imag, signal.imag, torch.conj(signal[2:5]), signal]
    assert given[0].is_conj()
    assert given[1].is_neg()
    for got in (over(given), ForkingPickler.loads(_plain([*given, torch.ones(2, requires_grad=True)]))):
        for one, other in zip(given, got, strict=False):
            assert not other.is_neg()
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "given",
    [
        torch.ones(2, requires_grad=True),
        torch.ones(2, device="meta"),
        torch.ones(3).to_sparse(),
        torch.arange(1000)[::10],
    ],
    ids=["requires grad", "meta", "sparse", "with large gaps"],
)
def test_what_cannot_lie_there_is_refused(given: torch.Tensor) -> None:
    with pytest.raises(CannotLieThereError) as error:
        over([torch.ones(2), given])
    assert error.value.needed == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    with pytest.raises(CannotLieThereError):
        over(torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]))


def test_parts_that_overlap_in_a_large_storage_are_refused() -> None:
    large = torch.arange(1000)
    with pytest.raises(CannotLieThereError):
        over([large[:10], large[5:15]])
    assert [got.tolist() for got in over([large[:3], large[3:5]])] == [[0, 1, 2], [3, 4]]


def test_a_subclass_of_tensor_goes_as_torch_sends_it() -> None:
    weight = nn.Parameter(torch.ones(2))
    got = over([weight])[0]
    assert type(got) is nn.Parameter
    assert torch.equal(got, weight)


def test_a_buffer_that_is_too_small_says_how_large_it_should_be() -> None:
    with pytest.raises(CannotLieThereError) as error:
        over([torch.ones(10), torch.ones(1000)], size=64)
    assert error.value.needed == 4064
    with pytest.raises(CannotLieThereError) as error:
        over([torch.ones(10), torch.ones(10)], size=64)
    assert error.value.needed == 128
