"""The transform for GPUs, in Triton's interpreter, gives what the one in Rust gives; and it compiles for a GPU."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch
from gradwire import _native
from gradwire.torch import _memory

pytest.importorskip("triton")

SIZES = (2_048, 2_049, 9_999, 66_001)
# Rounding to the dtype, once each way; Triton's interpreter and the processor round alike, but only float32 is promised.
UNITS = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@pytest.fixture(name="kernels")
def interpreted(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # The decorator asks when the module is made; imported anew, it does not keep what another test made.
    monkeypatch.delitem(sys.modules, "gradwire.torch._hadamard_triton", raising=False)
    return importlib.import_module("gradwire.torch._hadamard_triton")


def in_rust(tensor: torch.Tensor, elems: int, seed: int, *, inverse: bool) -> torch.Tensor:
    shape = _native.hadamard_shape(elems)
    assert shape is not None
    target = torch.empty(elems if inverse else shape[1], dtype=tensor.dtype)
    code = _memory.DTYPE_CODES[tensor.dtype]
    _native.hadamard(code, seed, _memory.address(tensor), _memory.address(target), inverse)
    return target


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("elems", SIZES)
def test_both_kernels_agree_there_and_back(kernels: types.ModuleType, elems: int, dtype: torch.dtype) -> None:
    seed = 2**63 + elems
    tensor = torch.randn(elems, generator=torch.Generator().manual_seed(elems)).to(dtype)
    expected = in_rust(tensor, elems, seed, inverse=False)
    rotated = kernels.spread(tensor, seed)
    restored = kernels.restore(expected, elems, seed)
    back = in_rust(expected, elems, seed, inverse=True)
    if dtype is torch.float32:
        assert torch.equal(rotated, expected)
        assert torch.equal(restored, back)
    else:
        assert torch.allclose(rotated, expected, rtol=UNITS[dtype], atol=0)
        assert torch.allclose(restored, back, rtol=UNITS[dtype], atol=0)
    assert (back.float() - tensor.float()).norm() <= (4 * UNITS[dtype] + 2**-19) * tensor.float().norm()


def test_small_tensors_and_other_dtypes_are_refused(kernels: types.ModuleType) -> None:
    assert kernels.Shape.of(2_047) is None
    assert _native.hadamard_shape(2_047) is None
    with pytest.raises(ValueError, match="too few"):
        kernels.spread(torch.zeros(2_047), 1)
    with pytest.raises(ValueError, match="float64"):
        kernels.spread(torch.zeros(4_096, dtype=torch.float64), 1)
    with pytest.raises(ValueError, match="not the rotation"):
        kernels.restore(torch.zeros(4_096), 4_097, 1)


def test_both_take_a_tensor_as_the_same_matrix(kernels: types.ModuleType) -> None:
    for elems in [2_048, 10_000, 524_287, 524_288, 25 << 18]:
        shape = kernels.Shape.of(elems)
        assert (shape.block, shape.padded) == _native.hadamard_shape(elems)
