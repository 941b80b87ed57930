import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from relaxd.board import ColumnError, decode_columns, encode_columns
from tests.kit.cases import each

NAMES = st.text("abcdefgh_", min_size=1, max_size=8)
ARRAYS = hnp.arrays(
    st.sampled_from(["<i4", "<i8", "u1", "<f4", "<f8", "<f2", ">f4", ">i8", "?"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, ARRAYS | JSON, max_size=5))
def test_what_is_encoded_is_decoded(columns):
    decoded = decode_columns(encode_columns(columns))
    assert list(decoded) == list(columns)
    for name, value in columns.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(decoded[name], value)
            assert decoded[name].dtype == value.dtype.newbyteorder("<")
            assert decoded[name].shape == value.shape
            assert not decoded[name].flags.writeable
        else:
            assert decoded[name] == value


def test_layout_is_raw_little_endian_and_aligned():
    payload = encode_columns({"text": "abc", "x": np.array([1, 2], dtype=">i4")})
    assert payload.endswith(struct.pack("<ii", 1, 2))
    assert payload[:4] == b"RXC1"
    assert len(payload) % 8 == 0


@pytest.mark.parametrize(
    "value", [np.array(["a"]), np.array([object()]), np.array([1j]), object(), float("nan"), {1, 2}]
)
def test_values_that_cannot_be_stored_are_named(value):
    with pytest.raises(ColumnError, match="'wrong'"):
        encode_columns({"wrong": value})


@pytest.mark.parametrize("name", ["", "a\tb", "a\nb"])
def test_a_name_that_would_break_the_header_is_refused(name):
    with pytest.raises(ColumnError, match="column name"):
        encode_columns({name: 1})


def lie(header: bytes, data: bytes = b"\0" * 16) -> bytes:
    header += b" " * (-len(header) % 8)
    return struct.pack("<4sI", b"RXC1", len(header)) + header + data


def test_the_header_is_as_documented():
    np.testing.assert_array_equal(decode_columns(lie(b"a\t<i4\t2,2\t16"))["a"], np.zeros((2, 2)))


@each(
    "payload",
    [
        b"",
        b"RXC1",
        b"XXXX\0\0\0\0",
        struct.pack("<4sI", b"RXC1", 2**31),
        lie(b"a"),
        lie(b"\xff\t<i4\t4\t16"),
        lie(b"a\t<i4\t4\t16\n"),
        lie(b"a\t<i4\t5\t16"),
        lie(b"a\t<i4\t5\t20"),
        lie(b"a\t<i4\t-1,-4\t16"),
        lie(b"a\t<i4\tx\t16"),
        lie(b"a\t<i4\t4\t-16"),
        lie(b"a\tO\t2\t16"),
        lie(b"a\t|V16\t1\t16"),
        lie(b"a\tjson\t\t16"),
        lie(b"a\tjson\t\t2", b"[" * 16),
        lie(b"a\t<i4\t4611686018427387904,4\t16"),
        lie(b"a\t<i4\t" + b",".join([b"1"] * 40) + b"\t4"),
        lie(b"a\t<i4\t4\t" + b"9" * 5000),
    ],
)
def test_a_lying_header_is_refused(payload):
    with pytest.raises(ColumnError):
        decode_columns(payload)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 150), st.binary(min_size=1, max_size=4))
def test_broken_payloads_never_do_worse_than_a_column_error(noise, position, change):
    good = encode_columns({"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": {"a": [1, "b"]}})
    for payload in (noise, good[:position], good[:position] + change + good[position + len(change) :]):
        with contextlib.suppress(ColumnError):
            decode_columns(payload)
