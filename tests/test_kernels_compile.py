"""The kernels compile for Hopper, by Triton's own compiler: no spills, its matrix unit, little shared memory.

No GPU is needed; `pytest tests/test_kernels_compile.py -s` prints the report.
"""
import sys

import pytest

import aot

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is there on Linux only")


def sbd_attention_launches():
    """Every shipped configuration; for one of them also lengths and block sizes that must not compile
    anything new."""
    import torch
    from kernels.sbd_attention import intervals
    from kernels.sbd_triton import Triton

    def launch(dtype, D, L=256, block_size=16, H=4, Hkv=2):
        shapes = ((1, 2 * L, heads, D) for heads in (H, Hkv, Hkv))
        q, k, v = (torch.zeros(s, dtype=dtype).transpose(1, 2).requires_grad_() for s in shapes)
        bounds = torch.stack(intervals(L, block_size), 1).int()
        out = Triton.apply(q, k, v, bounds)
        torch.autograd.grad(out, (q, k, v), out)

    for dtype in torch.bfloat16, torch.float16:
        for D in 16, 32, 48, 64, 128:
            launch(dtype, D)
    for L, block_size in (1, 1), (17, 5), (257, 64), (4096, 2):
        launch(torch.bfloat16, 128, L, block_size)
    for heads in 1, 6:
        # the compiler sees a 1 as a constant: one head, one in each group
        launch(torch.bfloat16, 32, H=heads, Hkv=heads)
    launch(torch.float32, 64)
    launch(torch.float32, 128)


def check(rows):
    """What every kernel must keep to; float32's registers are only reported."""
    aot.show(rows)
    for r in rows:
        assert r["shared"] <= aot.SHARED_LIMIT, r
        if r["dtype"] != "fp32":
            assert r["stack"] == r["local"] == 0, r


def test_sbd_attention():
    rows = aot.report("test_kernels_compile:sbd_attention_launches")
    check(rows)
    assert all(r["wgmma"] for r in rows if r["dtype"] != "fp32")
    assert len(rows) == 3 * (2 * 5 + 2 + 2)   # nothing was compiled again for another L or k
