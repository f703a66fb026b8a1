"""Reductions: the loop in C, its twin in NumPy, and a fold written out, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zcactor.collectives.folding import (
    Operand,
    fold,
    fold_by_numpy,
    fold_by_terms,
    native_kind,
    operand_of,
    swift_nbytes,
)  # fmt: skip
from zcactor.native import hot

NARROW = (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
NUMBERS = (
    np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64,
    np.complex64, np.complex128, *NARROW,
)  # fmt: skip


def written_out(op: str, inputs: list[Any]) -> Any:
    """The reduction in the order of the inputs, one NumPy operation after the other."""
    return written_by_terms(op, inputs, [range(len(inputs))])


def written_by_terms(op: str, inputs: list[Any], terms: Sequence[Sequence[int]]) -> Any:
    """The reduction of terms, each in the order of its inputs."""
    dtype = inputs[0].dtype
    wide = np.dtype(np.float32) if dtype in NARROW and op in ("sum", "mean", "prod") else dtype
    function = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}[op]

    def reduced(arrays: list[Any]) -> Any:
        total = arrays[0].astype(wide)
        for each in arrays[1:]:
            total = function(total, each.astype(wide)).astype(wide)
        return total

    with np.errstate(all="ignore"):
        total = reduced([reduced([inputs[rank] for rank in ranks]) for ranks in terms])
        if op == "mean":
            if wide.kind == "c":
                total = (total.real / len(inputs) + 1j * (total.imag / len(inputs))).astype(wide)
            else:
                total = (total / len(inputs)).astype(wide)
        return total.astype(dtype)


def drawn(rng: np.random.Generator, dtype: Any, count: int) -> Any:
    """Elements of which sums are rounded, and wrap or overflow now and then."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, count, dtype, endpoint=True)
    if dtype.kind == "c":
        return (rng.normal(size=count) + 1j * rng.normal(size=count)).astype(dtype)
    scale = 10.0 ** rng.integers(-6, 6, count)
    with np.errstate(all="ignore"):
        return (rng.normal(size=count) * scale).astype(dtype)


def bits(array: Any) -> Any:
    """The bytes of an array, with one pattern for all NaNs: IEEE 754 leaves theirs open."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind in "iub":
        return array.tobytes()
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    with np.errstate(all="ignore"):
        nan = np.isnan(array.astype(np.float64))
    array = array.copy()
    array[nan] = np.array(np.nan, array.dtype)
    return array.tobytes()


def reduced(how: Any, op: str, inputs: list[Any], start: int = 0, count: int | None = None) -> Any:
    """The result of `fold` or of its twin."""
    count = inputs[0].size - start if count is None else count
    out = np.empty(count, inputs[0].dtype)
    how(op, inputs[0].dtype, [operand_of(each) for each in inputs], out.ctypes.data, start, count)
    return out


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.integers(0, 2**32), st.integers(1, 8), st.sampled_from(NUMBERS),
    st.sampled_from(("sum", "mean", "min", "max", "prod")), st.integers(0, 9000),
)  # fmt: skip
@example(0, 3, np.complex64, "prod", 1)
def test_a_reduction_is_the_fold_in_the_order_of_the_ranks(seed: int, size: int, dtype: Any, op: str, n: int) -> None:
    if (op == "mean" and np.dtype(dtype).kind in "iu") or (op in ("min", "max") and np.dtype(dtype).kind == "c"):
        op = "sum"
    rng = np.random.default_rng(seed)
    inputs = [drawn(rng, dtype, n) for _ in range(size)]
    wanted = bits(written_out(op, inputs))
    assert bits(reduced(fold, op, inputs)) == wanted
    assert bits(reduced(fold_by_numpy, op, inputs)) == wanted


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from(NUMBERS), st.data())
def test_strides_and_cuts_change_no_bit(seed: int, size: int, dtype: Any, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    inputs = []
    for _ in range(size):
        whole = drawn(rng, dtype, 40 * 36).reshape(40, 36)
        view = data.draw(st.sampled_from(("plain", "transposed", "reversed", "step", "fortran")))
        array = {
            "plain": whole[:18, :20].copy(),
            "transposed": whole[:20, :18].T,
            "reversed": whole[17::-1, 19::-1],
            "step": whole[:36:2, ::-1][:, :20],
            "fortran": np.asfortranarray(whole[:18, :20]),
        }[view]
        inputs.append(array)
    wanted = written_out("sum", [np.ascontiguousarray(each).reshape(-1) for each in inputs])
    cut = data.draw(st.integers(0, 360))
    for how in (fold, fold_by_numpy):
        assert bits(reduced(how, "sum", inputs, 0, cut)) == bits(wanted[:cut])
        assert bits(reduced(how, "sum", inputs, cut)) == bits(wanted[cut:])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_narrow_float_is_read_and_rounded_as_numpy_does(dtype: Any) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for other in (0.0, 1.0, -3.1e-5, 65504.0):
        inputs = [every, np.full(1 << 16, other, dtype)]
        assert bits(reduced(fold, "sum", inputs)) == bits(written_out("sum", inputs)), other
    # Seven at a time: the loop for what is left of a vector.
    for start in range(0, 1 << 16, 4099):
        inputs = [every[start : start + 7].copy(), np.full(len(every[start : start + 7]), 0.1, dtype)]
        assert bits(reduced(fold, "sum", inputs)) == bits(written_out("sum", inputs))


@pytest.mark.slow
def test_long_inputs_are_blocked() -> None:
    rng = np.random.default_rng(0)
    for dtype in (np.float64, np.uint8, np.float16):
        inputs = [drawn(rng, dtype, 1_000_003) for _ in range(3)]
        assert bits(reduced(fold, "sum", inputs)) == bits(written_out("sum", inputs))
        assert bits(reduced(fold_by_numpy, "sum", inputs)) == bits(written_out("sum", inputs))


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize(("dtype", "first"), [(np.float32, 0), (np.float32, 1), (np.float64, 2), (np.uint8, 16)])
def test_a_large_result_is_written_past_the_cache(size: int, dtype: Any, first: int) -> None:
    rng, count = np.random.default_rng(size), (8 << 20) // np.dtype(dtype).itemsize + 3
    inputs = [drawn(rng, dtype, count) for _ in range(size)]
    op, memory = "sum" if dtype is np.uint8 else "mean", np.full(count + first + 64, 7, dtype)
    start = -memory.ctypes.data % 64 // memory.itemsize + first
    fold(op, memory.dtype, [operand_of(each) for each in inputs], memory[start:].ctypes.data, 0, count)
    assert bits(memory[start : start + count]) == bits(written_out(op, inputs))
    assert (memory[:start] == 7).all() and (memory[start + count :] == 7).all()


def test_elements_at_odd_addresses_and_of_the_other_byte_order() -> None:
    raw = np.zeros(8 * 100 + 1, np.uint8)
    odd = raw[1:].view(np.float64)
    odd[:] = np.arange(100)
    swapped = np.arange(100, dtype=">f8")
    assert reduced(fold, "sum", [odd, odd]).tolist() == (np.arange(100) * 2).tolist()
    assert reduced(fold, "sum", [swapped, swapped]).tolist() == (np.arange(100) * 2).tolist()


def test_bools_have_min_and_max() -> None:
    a, b = np.array([True, False, True]), np.array([True, True, False])
    assert reduced(fold, "max", [a, b]).tolist() == [True, True, True]
    assert reduced(fold, "min", [a, b]).tolist() == [True, False, False]


def test_the_loop_in_c_knows_the_usual_sums_only() -> None:
    assert native_kind(np.dtype(np.float32), "sum") == "f32"
    assert native_kind(np.dtype(np.int64), "sum") == "u64"
    assert native_kind(np.dtype(ml_dtypes.bfloat16), "mean") == "bf16"
    assert native_kind(np.dtype(">f4"), "sum") is None
    assert native_kind(np.dtype(np.longdouble), "sum") is None
    assert native_kind(np.dtype(ml_dtypes.float8_e5m2), "sum") is None
    assert native_kind(np.dtype(np.float32), "max") is None


@pytest.mark.parametrize(
    ("kind", "inputs", "count", "divisor", "said"),
    [
        ("f99", 1, 1, 0, "no sums of f99"),
        ("f32", 0, 1, 0, "0 inputs"),
        ("f32", 1, -1, 0, "negative count"),
        ("f32", 1, 1, -1, "divisor"),
        ("u8", 1, 1, 2, "divisor"),
    ],
)
def test_the_loop_in_c_refuses_bad_arguments(kind: str, inputs: int, count: int, divisor: int, said: str) -> None:
    array = np.zeros(4)
    with pytest.raises(ValueError, match=said):
        hot.fold(kind, (array.ctypes.data,) * inputs, array.ctypes.data, count, divisor)


def test_the_loop_in_c_refuses_odd_addresses_and_other_types() -> None:
    array = np.zeros(4)
    with pytest.raises(ValueError, match="not a multiple of 8 bytes"):
        hot.fold("f64", (array.ctypes.data + 1,), array.ctypes.data, 1, 0)
    with pytest.raises(TypeError):
        hot.fold("f64", ("address",), array.ctypes.data, 1, 0)
    with pytest.raises(TypeError):
        hot.fold("f64", [array.ctypes.data], array.ctypes.data, 1, 0)  # type: ignore[arg-type]


def test_the_loop_in_c_takes_bytes_and_arrays() -> None:
    array, out = np.arange(5.0), np.empty(5)
    hot.fold("f64", (array.tobytes(), array), out, 5, 0)
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    for inputs in ((array.tobytes()[:-1],), (array[:4],), (np.arange(10.0)[::2],)):
        with pytest.raises(ValueError, match="for 5 elements of 8 bytes"):
            hot.fold("f64", inputs, out, 5, 0)
    with pytest.raises(ValueError, match="for 5 elements of 8 bytes"):
        hot.fold("f64", (array,), out[::2], 5, 0)


def test_an_operand_of_an_array_with_gaps_keeps_the_array() -> None:
    array = np.arange(10.0)[::2]
    operand = operand_of(array)
    assert operand.array is array
    assert operand_of(np.arange(10.0)).array is None


@pytest.mark.parametrize(
    ("op", "array", "nbytes"),
    [
        ("sum", np.ones(100, np.float32), 2 * 40),
        ("mean", np.ones(100, np.complex128), 2 * 160),
        ("sum", np.ones(100, np.int8), 2 * 10),
        ("sum", np.ones(100, np.float16), None),  # converted
        ("sum", np.ones(100, ml_dtypes.bfloat16), None),
        ("max", np.ones(100, np.float32), None),  # by NumPy
        ("sum", np.ones(200, np.float32)[::2], None),  # gathered
    ],
)
def test_what_runs_at_the_speed_of_memory_is_known(op: str, array: Any, nbytes: int | None) -> None:
    assert swift_nbytes(op, array.dtype, [operand_of(array)] * 2, 10) == nbytes


# ---------------------------------------------------------------- sums of several ranks


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int16, np.complex64])
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
def test_terms_are_made_first_and_rounded_last(dtype: Any, op: str) -> None:
    if np.dtype(dtype).kind == "i" and op == "mean":
        return
    rng = np.random.default_rng(8)
    inputs = [drawn(rng, dtype, 70_000) for _ in range(5)]
    terms = ((0, 3), (1,), (2, 4))
    result = np.empty(69_900, dtype)
    fold_by_terms(op, np.dtype(dtype), [operand_of(x) for x in inputs], terms, result.ctypes.data, 100, 69_900)
    assert bits(result) == bits(written_by_terms(op, inputs, terms)[100:])
    fold_by_terms(op, np.dtype(dtype), [operand_of(x) for x in inputs], [range(5)], result.ctypes.data, 100, 69_900)
    assert bits(result) == bits(written_out(op, inputs)[100:])


def test_operands_may_be_sums_of_another_dtype() -> None:
    first, second = np.full(10, 2049, np.float32), np.ones(10, np.float16)
    result = np.empty(10, np.float16)
    operands = [Operand(first.ctypes.data, None, first, np.dtype(np.float32)), operand_of(second)]
    fold("mean", np.dtype(np.float16), operands, result.ctypes.data, 0, 10, None, 3)
    assert np.array_equal(result, np.full(10, np.float32(2050) / 3).astype(np.float16))
    total = np.empty(10, np.float32)
    fold("sum", np.dtype(np.float16), operands, total.ctypes.data, 0, 10, np.dtype(np.float32), 0)
    assert np.array_equal(total, np.full(10, 2050, np.float32))
