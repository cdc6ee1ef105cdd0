"""Settings that PyTorch processes need for bfloat16 on some CPUs.

Some machines announce AMX but trap it: oneDNN, which PyTorch multiplies with, then dies of SIGILL in its first product.
The variable `ONEDNN_MAX_CPU_ISA` limits what oneDNN uses; it is read at the first product of a process.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISAS = ("AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")  # all without AMX, the newest first
PRODUCTS = """
import torch
from torch.nn.functional import conv1d, linear

for n in (8, 64, 512):
    x = torch.ones(n, n, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        (linear(x, x) @ x + conv1d(x[None], x[..., None])[0]).sum().backward()
"""


@functools.cache
def environment_for_bfloat16(command: tuple[str, ...] = (sys.executable, "-c", PRODUCTS)) -> dict[str, str]:
    """The environment that a process needs to multiply bfloat16; empty where it needs none, or has it already.

    Found once a process, by a child that multiplies: the highest setting by which it dies of no signal.
    """
    if VARIABLE in os.environ:
        return {}
    for environment in ({}, *({VARIABLE: isa} for isa in ISAS)):
        run = subprocess.run(command, env=os.environ | environment, stderr=subprocess.DEVNULL, check=False)
        if run.returncode >= 0:  # PyTorch may be missing
            return environment
    return {}
