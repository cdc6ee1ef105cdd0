"""What compilers make of the steps of `cases.py`: which kernels they have, and what runs beside what."""

import importlib.util
from collections.abc import Iterator

import pytest

from jvarlen import UserError
from jvarlen.targets.report import TargetRow
from tests.targets.cases import CASES, FEW, REFUSED, Case, known_faults

_TRITON = {"_forward_kernel", "_dq_kernel", "_dkv_kernel"}
_CUDNN = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
_SPLASH = {"fwd", "dq", "dkv"}


def faults_of(case: Case, row: TargetRow) -> Iterator[str]:
    """By name, what a program of a case should have and has not."""
    assert row.kernels is not None
    assert row.communication is not None
    if case.is_tpu:
        kernels, expected = {name.split("_")[2] for name in row.kernels}, _SPLASH
    else:
        kernels, expected = {*row.kernels}, _CUDNN if case.is_by_cudnn else _TRITON
    if kernels != expected:
        yield f"attention by {sorted(kernels)}"
    for each in row.communication:
        if each.asynchronous < each.times:
            yield f"{each.kind} along {', '.join(each.axes)} holds up everything else"


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[] if case in FEW else pytest.mark.slow) for case in CASES]
)
@pytest.mark.usefixtures("optimized")
def test_programs_have_no_faults_but_known_ones(case):
    if importlib.util.find_spec("libtpu" if case.is_tpu else "jax_cuda12_plugin") is None:
        pytest.skip(f"XLA's compiler for {'TPUs' if case.is_tpu else 'GPUs'} is not installed")
    if case.is_by_cudnn and importlib.util.find_spec("nvidia.cudnn") is None:
        pytest.skip("cuDNN is not installed")
    found = {fault for row in case.compile() for fault in faults_of(case, row)}
    assert found == known_faults(case)


@pytest.mark.parametrize(("model", "layout"), REFUSED)
def test_what_the_list_leaves_out_is_refused(model, layout):
    with pytest.raises(UserError, match=REFUSED[model, layout]):
        Case("here", model, layout, "padded", 4).compile()
