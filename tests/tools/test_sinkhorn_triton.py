"""The Triton kernel of Sinkhorn equals the reference, values and gradients (run in Triton's interpreter, on a CPU)."""

from __future__ import annotations

import subprocess
import sys

_CHECK = """
import torch
from deepinfer_core.kernels.reference.mhc import sinkhorn
from tools.train_tiny.sinkhorn_triton import Sinkhorn

torch.manual_seed(0)
start = torch.softmax(torch.randn(70, 4, 4) * 2, -1)
weight = torch.randn(70, 4, 4)
grads = []
for run in (lambda c: sinkhorn(c, 20, 1e-6), lambda c: Sinkhorn.apply(c, 20, 1e-6)):
    c = start.clone().requires_grad_(True)
    out = run(c)
    (out * weight).sum().backward()
    grads.append((out.detach(), c.grad))
(expected, expected_grad), (got, got_grad) = grads
assert (got - expected).abs().max() < 1e-6, (got - expected).abs().max()
# Compared under the softmax: the gradient of a small entry itself is large and ill-conditioned in float32.
assert ((got_grad - expected_grad) * start).abs().max() < 1e-6
"""


def test_the_kernel_equals_the_reference_forward_and_backward() -> None:
    # The interpreter is chosen when Triton is imported, so it needs a process of its own.
    result = subprocess.run(
        [sys.executable, "-c", _CHECK], env={"TRITON_INTERPRET": "1", "PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
