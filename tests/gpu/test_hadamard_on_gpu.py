"""The transform on a GPU gives what the one in Rust gives. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from gradwire import _native
from gradwire.torch import _memory

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from gradwire.torch import _hadamard_triton as kernels

SEED = 2**64 - 17


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("elems", [2_048, 9_999, 600_011, 25 << 18])
def test_a_gpu_and_a_processor_rotate_alike(elems: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(elems, generator=torch.Generator().manual_seed(elems)).to(dtype)
    shape = _native.hadamard_shape(elems)
    assert shape is not None
    expected = torch.empty(shape[1], dtype=dtype)
    code = _memory.DTYPE_CODES[dtype]
    _native.hadamard(code, SEED, _memory.address(tensor), _memory.address(expected), False)
    rotated = kernels.spread(tensor.cuda(), SEED)
    assert torch.equal(rotated.cpu(), expected)
    restored = kernels.restore(rotated, elems, SEED).cpu()
    back = torch.empty(elems, dtype=dtype)
    _native.hadamard(code, SEED, _memory.address(expected), _memory.address(back), True)
    assert torch.equal(restored, back)
