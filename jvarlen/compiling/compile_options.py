"""Compiler options, the cache of programs, and when programs are compiled. Settings are read without JAX."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jvarlen._common.checks import UserError, check_at_least_one, if_given
from jvarlen._common.files import default_cache_dir
from jvarlen._common.keywords import check_keywords
from jvarlen._common.settings import Settings

__all__ = ["CompileOptions", "OptionValue", "When", "default_compilation_cache"]

When = Literal["ahead", "background"]
OptionValue: TypeAlias = Any  # bool, int, float, str, or what else an option of JAX takes

_COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"
# What goes into CUDA graphs: XLA's default list, and loops and branches, which it leaves out where the driver or the
# platform has none in graphs.
_IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
_LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
_ALL_REDUCE_BYTES = "xla_gpu_all_reduce_combine_threshold_bytes"
_DISABLED_PASSES = "xla_disable_hlo_passes"
_YNN_FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
# Collectives of these kinds run beside computation; those of other kinds do so on TPUs by default.
_ASYNC_ON_TPUS = (
    "xla_enable_async_all_reduce", "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
    "xla_tpu_enable_async_all_to_all",
)  # fmt: skip
_GPU_PLATFORMS = ("gpu", "cuda", "rocm")
_NAME_AND_VALUE = re.compile(r"([A-Za-z]\w*)=(.*)", re.DOTALL)


def default_compilation_cache() -> Path:
    """The directory for compiled programs among this user's caches."""
    return default_cache_dir() / "compiled"


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions(Settings):
    """How the step is compiled and run.

    Raises:
      ValueError: a value out of its range, or xla_options that are not of the form "name=value".

    Example:
      >>> options = CompileOptions(xla_options=("xla_gpu_autotune_level=2",))
      >>> options.compiler_options("gpu", num_devices=8)["xla_gpu_enable_latency_hiding_scheduler"]
      True
      >>> options.compiler_options("cpu", num_devices=8)
      {'xla_gpu_autotune_level': '2'}
    """

    cache_dir: Path | None = dataclasses.field(default_factory=default_compilation_cache, metadata={"scope": "call"})
    """Persistent compilation cache directory, unless JAX is already set to another; None leaves JAX's setting alone."""
    num_threads: int | None = dataclasses.field(default=None, metadata={"scope": "process"})
    """Threads that compile; None for one per core (in the background: per two), or a single one if several processes
    train."""
    when: When | None = None
    """Compile everything before the first step (ahead), or, while steps run, what later steps need (background).
    None: ahead, and in the background in a whole training run of one process. Several processes compile ahead."""
    time_steps: bool | None = None
    """Measure the seconds of every step. None: only in a whole training run."""
    # Not kept by a run: they are files that the compiler writes and programs that it calls, too.
    xla_options: tuple[str, ...] = dataclasses.field(default=(), metadata={"scope": "call"})
    """More XLA compiler options, each as name=value, with true or false for switches. They override the library's
    own, such as xla_gpu_enable_command_buffer= for no CUDA graphs."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least_one(**if_given(num_threads=self.num_threads))
        odd = [option for option in self.xla_options if not _NAME_AND_VALUE.fullmatch(option)]
        if odd:
            raise UserError(f"xla_options are of the form name=value, without dashes before the name, not {odd}")

    @property
    def in_background(self) -> bool:
        """Whether steps run while other shapes are compiled."""
        return self.when == "background"

    def compiler_options(
        self, platform: str, num_devices: int, *, has_grad_buckets: bool = False
    ) -> dict[str, OptionValue]:
        """The options for `lowered.compile(compiler_options=...)`.

        CUDA graphs pay off in small steps on one device. On several devices, steps wait for collectives: the
        latency-hiding scheduler moves computation beside them, and graphs are off so that their launch order does not
        interfere. These defaults yield to the same flags in `XLA_FLAGS` and `LIBTPU_INIT_ARGS`, and to `xla_options`.

        Args:
          platform: "gpu", "cuda", "rocm", "tpu" or "cpu".
          num_devices: how many devices a step runs on, including those of other processes.
          has_grad_buckets: whether the layout of the step has `grad_bucket_bytes`, whose buckets must stay apart.

        Returns:
          Values by name; `xla_options` come last.
        """
        options: dict[str, OptionValue] = {}
        flags = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
        if platform in _GPU_PLATFORMS:
            if _COMMAND_BUFFERS not in flags:
                options[_COMMAND_BUFFERS] = _IN_GRAPHS if num_devices == 1 else ""
            if _LATENCY_HIDING not in flags and num_devices > 1:
                options[_LATENCY_HIDING] = True
            if has_grad_buckets:
                options[_ALL_REDUCE_BYTES] = 0  # buckets stay apart
        elif platform == "tpu":
            options |= {name: True for name in _ASYNC_ON_TPUS if num_devices > 1 and name not in flags}
        elif has_grad_buckets and num_devices > 1:
            options[_DISABLED_PASSES] = "cpu-all-reduce-combiner"  # which merges all buckets at the end of the step
            options[_YNN_FUSIONS] = ""  # products in fusions hold up the thread that would run a reduction meanwhile
        named = {name: _parse(name, value) for name, _, value in (each.partition("=") for each in self.xla_options)}
        if _DISABLED_PASSES in options and _DISABLED_PASSES in named:
            named[_DISABLED_PASSES] = f"{options[_DISABLED_PASSES]},{named[_DISABLED_PASSES]}"
        return options | named


def _parse(name: str, text: str) -> OptionValue:
    """The value as jaxlib takes it: XLA reads text by the option's type, but knows only "True" and "False"."""
    if name.startswith("xla_"):
        return text.capitalize() if text.lower() in ("true", "false") else text
    try:
        return ast.literal_eval(text)  # options of JAX, which it hands on as they are
    except (ValueError, SyntaxError):
        return text
