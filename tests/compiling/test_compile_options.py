"""Compiler options: defaults that fit the devices; a wrong option is reported at once."""

import jax
import jax.numpy as jnp
import jaxlib
import pytest

from jvarlen import no_recompiles
from jvarlen._common.options import parse
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.lowering import known_options

GRAPHS = "xla_gpu_enable_command_buffer"
WITH_LOOPS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
OVERLAP = "xla_gpu_enable_latency_hiding_scheduler"
COMBINE = "xla_gpu_all_reduce_combine_threshold_bytes"

ASYNC = (
    "xla_enable_async_all_reduce",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
    "xla_tpu_enable_async_all_to_all",
)


@pytest.fixture(autouse=True)
def _without_flags(monkeypatch):
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize(
    ("platform", "num_devices", "has_grad_buckets", "expected"),
    [
        ("gpu", 1, False, {GRAPHS: WITH_LOOPS}),
        ("gpu", 8, False, {GRAPHS: "", OVERLAP: True}),
        ("cuda", 2, False, {GRAPHS: "", OVERLAP: True}),
        ("rocm", 2, False, {GRAPHS: "", OVERLAP: True}),
        ("gpu", 1, True, {GRAPHS: WITH_LOOPS, COMBINE: 0}),
        ("cpu", 8, False, {}),
        ("tpu", 8, True, dict.fromkeys(ASYNC, True)),
        ("tpu", 1, False, {}),
    ],
)
def test_options_follow_from_the_devices(platform, num_devices, has_grad_buckets, expected):
    options = CompileOptions(xla_options=("xla_gpu_autotune_level=2",))
    found = options.compiler_options(platform, num_devices, has_grad_buckets=has_grad_buckets)
    assert found == expected | {"xla_gpu_autotune_level": "2"}


def test_a_default_yields_to_the_same_flag_in_the_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{GRAPHS}=FUSION --{OVERLAP}=false")
    assert CompileOptions().compiler_options("gpu", 8) == CompileOptions().compiler_options("gpu", 1) == {}
    options = CompileOptions(xla_options=(f"{OVERLAP}=true",))
    assert options.compiler_options("gpu", 8) == {OVERLAP: "True"}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{ASYNC[0]}=false")
    assert CompileOptions().compiler_options("tpu", 8) == dict.fromkeys(ASYNC[1:], True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_threads": 0}, r"at least 1 .*: num_threads \(0\)"),
        ({"when": "later"}, r"when \('later'\) must be one of 'ahead', 'background'"),
        ({"xla_options": ("xla_a=1", "xla_b", "--xla_c=1", "=1")}, r"\['xla_b', '--xla_c=1', '=1'\]"),
    ],
)
def test_settings_at_fault_are_listed(settings, said):
    with pytest.raises(ValueError, match=said):
        CompileOptions(**settings)


def test_options_by_name_override_those_of_the_library():
    options = CompileOptions(xla_options=(f"{COMBINE}=1", f"{GRAPHS}="))
    assert options.compiler_options("gpu", 1, has_grad_buckets=True) == {COMBINE: "1", GRAPHS: ""}


def test_options_come_from_the_command_line():
    line = "--cache-dir None --when background --xla-options xla_a=true xla_b="
    options = parse(CompileOptions, line.split(), "jvarlen")
    assert options == CompileOptions(cache_dir=None, when="background", xla_options=("xla_a=true", "xla_b="))


def test_the_installed_jaxlib_takes_what_the_fields_and_every_kind_of_value_become():
    options = CompileOptions(
        xla_options=(
            "xla_gpu_enable_nccl_user_buffers=true",
            "xla_cpu_enable_fast_math=False",
            "xla_gpu_autotune_level=2",
            "xla_gpu_autotune_gemm_rtol=1",
            "xla_disable_hlo_passes=one,two",
        )
    ).compiler_options("gpu", 2, has_grad_buckets=True)
    assert {GRAPHS, OVERLAP, COMBINE} < set(options)
    assert known_options(options, {}, jax.devices()[0]) == options
    jax.jit(lambda x: x + 1).lower(jnp.float32(0)).compile(compiler_options=options)


def test_an_option_that_jaxlib_does_not_know_is_named():
    options = CompileOptions(xla_options=("xla_none=1", "xla_gpu_autotune_level=2"))
    with pytest.raises(ValueError, match=rf"jaxlib {jaxlib.__version__} does not support .*option: 'xla_none'"):
        known_options(options.compiler_options("gpu", 1), {}, jax.devices()[0])


def test_a_default_that_jaxlib_does_not_know_is_left_out():
    device, defaults = jax.devices()[0], {GRAPHS: "FUSION,NEWER", OVERLAP: True}
    assert known_options(defaults, defaults, device) == {OVERLAP: True}
    with pytest.raises(ValueError, match=rf"support these options: {GRAPHS}='FUSION,NEWER' "):
        known_options(defaults, {OVERLAP: True}, device)


def test_a_value_of_jaxs_own_options_that_cannot_be_read_is_named():
    options = CompileOptions(xla_options=("optimization_level=high",)).compiler_options("cpu", 1)
    with pytest.raises(ValueError, match="optimization_level='high'"):
        known_options(options, {}, jax.devices()[0])


def test_the_check_leaves_no_trace():
    with no_recompiles() as count:
        known_options({OVERLAP: True}, {}, jax.devices()[-1])
    assert count.num_compilations == 0
