"""`TensorReader`: layouts of plain tensors by DLPack's C functions, as `describe` reads them."""

from __future__ import annotations

import ctypes
import itertools
import struct
from sys import getrefcount
from typing import Any

import pytest
import torch
from torch import Tensor

from sonata_aot.loader import _native, direct
from sonata_aot.loader.ssd_tensors import UNREADABLE, describe

CAPSULE = getattr(Tensor, "__dlpack_c_exchange_api__", None)
pytestmark = pytest.mark.skipif(CAPSULE is None, reason="this torch has no DLPack C functions")

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
BASE = torch.zeros(4096, dtype=torch.bfloat16)


@pytest.fixture
def reader() -> _native.TensorReader:
    made = direct.make_reader()
    assert made is not None
    return made


def plain_layouts() -> dict[str, Tensor]:
    """Tensors of many layouts."""
    found = {f"{dtype}": torch.zeros(3, 4, dtype=dtype) for dtype in DTYPES}
    shapes = [(), (0,), (1,), (12,), (3, 4), (4, 3), (0, 3), (3, 0), (1, 12), (2, 3, 2), (1,) * 8]
    found |= {f"shape {shape}": torch.zeros(shape) for shape in shapes}
    strides = [(4, 1), (1, 3), (5, 1), (0, 1), (1, 0), (0, 0), (2, 2), (1, 1)]
    found |= {f"strides {step}": BASE.as_strided((3, 4), step) for step in strides}
    found |= {f"from {start}": BASE[start : start + 4] for start in range(10)}
    found["transposed twice"] = torch.zeros(3, 4).t().t()
    found["parameter"] = torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False)
    found["meta sized 0"] = torch.zeros(0)
    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)
    found["freed"] = freed
    return found


def test_layouts_are_told_apart_as_describe_does(reader):
    """Keys of both ways are equal for the same pairs of tensors."""
    tensors = plain_layouts()
    native = {name: reader.describe((tensor,), True) for name, tensor in tensors.items()}
    python = {name: describe(tensor) for name, tensor in tensors.items()}
    assert None not in native.values()
    for one, other in itertools.combinations(tensors, 2):
        assert (native[one] == native[other]) == (python[one] == python[other]), (one, other)
    assert native["strides (4, 1)"] != native["strides (5, 1)"]
    assert native["from 0"] == native["from 8"] != native["from 1"]


def test_places_count(reader):
    one, other = torch.zeros(3), torch.zeros(4)
    tuples: list[Any] = [
        (), (None,), (None, None), (one,), (one, None), (None, one), (one, other), (other, one),
        (one, one), (one, other, None), (None, one, other), (one,) * 16,
    ]  # fmt: skip
    found = [reader.describe(each, False) for each in tuples]
    assert len({*found}) == len(tuples)


class Sub(Tensor):
    pass


@pytest.mark.filterwarnings("ignore")  # of layouts in beta state
def test_what_is_not_plain_has_no_description(reader):
    unwanted: dict[str, Any] = {
        "a number": 1,
        "a list": [1.0],
        "a class": Tensor,
        "a subclass": torch.zeros(3).as_subclass(Sub),
        "a subclass's parameter": torch.nn.Parameter(torch.zeros(3).as_subclass(Sub)),
        "sparse": torch.zeros(3, 4).to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "quantised": torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
        "meta": torch.zeros(3, device="meta"),
        "negated": torch._neg_view(torch.zeros(3)),  # pyright: ignore[reportPrivateImportUsage]
        "imaginary part": torch.zeros(3, dtype=torch.complex64).conj().imag,
        "nine dimensions": torch.zeros((1,) * 9),
    }
    plain = torch.zeros(3)
    for name, item in unwanted.items():
        assert reader.describe((plain, item, None), False) is None, name
    with torch._subclasses.FakeTensorMode():
        assert reader.describe((torch.zeros(3),), False) is None
    seen = []
    torch.vmap(lambda x: seen.append(reader.describe((x,), False)) or x)(torch.zeros(2, 3))
    assert seen == [None]
    assert reader.describe((plain,), False) is not None  # no error is left behind


def test_gradients_count_where_they_are_asked_for(reader):
    plain, needed = torch.zeros(3), torch.zeros(3, requires_grad=True)
    assert reader.describe((plain,), True) == reader.describe((plain,), False)
    assert reader.describe((needed,), True) is None
    assert reader.describe((needed,), False) == reader.describe((plain,), False)
    assert reader.describe((torch.nn.Parameter(plain),), True) is None
    assert reader.describe((torch.nn.Parameter(plain),), False) is not None


def test_arguments_of_the_wrong_kind(reader):
    with pytest.raises(TypeError, match="tuple"):
        reader.describe([torch.zeros(3)], True)
    with pytest.raises(ValueError, match="more than 16"):
        reader.describe((None,) * 17, True)
    for api in (None, 3, object()):
        with pytest.raises(TypeError, match="capsule"):
            _native.TensorReader(api, (Tensor,))
    wrong: tuple[Any, ...] = ((), (3,))
    for classes in wrong:
        with pytest.raises(TypeError, match="classes"):
            _native.TensorReader(CAPSULE, classes)


def test_reading_takes_no_memory_of_torch_and_no_reference(reader):
    tensors = (torch.zeros(3, 4), torch.zeros(0), None)
    before = [getrefcount(tensor) for tensor in tensors[:2]]
    with torch.profiler.profile(profile_memory=True) as profile:
        for _ in range(100):
            reader.describe(tensors, True)
    assert [getrefcount(tensor) for tensor in tensors[:2]] == before
    assert not [event for event in profile.events() or () if event.name == "[memory]"]


# Stand-ins for the table of functions: version, older table, and five functions.
NAME = b"dlpack_exchange_api"
FILL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)


def capsule(table: Any) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(table), NAME, None)


def table(major: int, older: int, fill: Any = None) -> Any:
    words = (ctypes.c_uint64 * 7)(major, older, 0, 0, 0, 0, 0)
    if fill is not None:
        words[5] = ctypes.cast(fill, ctypes.c_void_p).value or 0
    return words


def test_only_a_known_version_is_used():
    @FILL
    def fill(_: object, view: int) -> int:
        shape[0] = 7
        where = ctypes.addressof(shape)
        packed = struct.pack("<QiiiBBHQQQ", 0x1008, 2, 3, 1, 2, 32, 1, where, where, 4)
        ctypes.memmove(view, packed, 48)
        return 0

    shape = (ctypes.c_int64 * 1)()
    new, old, none = table(2, 0, fill), table(1, 0, fill), table(1, 0)
    for unknown in (new, none):
        with pytest.raises(ValueError, match="version 1"):
            _native.TensorReader(capsule(unknown), (Tensor,))
    for known in (old, table(2, ctypes.addressof(old))):
        found = _native.TensorReader(capsule(known), (Tensor,)).describe((torch.zeros(3),), True)
        # Of cuda:3, one dimension, float32, 12 bytes past a multiple of 16.
        assert found is not None
        first, device, *rest = struct.unpack("<4q", found)
        assert (device, rest) == (2 << 32 | 3, [7, 7])
        assert first == 1 | 1 << 8 | 12 << 16 | 2 << 24 | 32 << 32 | 1 << 48


def test_without_the_functions_there_is_no_reader(monkeypatch):
    monkeypatch.setattr(Tensor, "__dlpack_c_exchange_api__", None)
    assert direct.make_reader() is None
    new = table(2, 0)
    monkeypatch.setattr(Tensor, "__dlpack_c_exchange_api__", capsule(new))
    assert direct.make_reader() is None


def test_what_describe_cannot_read_has_no_description(reader):
    for item in (torch.zeros(3, 4).to_sparse(), 3, [1.0]):
        assert reader.describe((item,), False) is None
        with pytest.raises(UNREADABLE):
            describe(item)  # pyright: ignore[reportArgumentType]
