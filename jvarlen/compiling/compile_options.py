"""Compiler options, checked against the installed jaxlib."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jaxlib
import numpy as np
from jax.extend.backend import get_compile_options

from jvarlen.compiling.compilation_cache import default_compilation_cache

__all__ = ["CompileOptions", "Fallback", "check_compiler_options"]

Fallback = Literal["error", "pad"]
OptionValue = bool | int | float | str

_COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"
_LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
_ALL_REDUCE_BYTES = "xla_gpu_all_reduce_combine_threshold_bytes"
_FIELD_OF_OPTION = {
    _COMMAND_BUFFERS: "command_buffers",
    _LATENCY_HIDING: "latency_hiding_scheduler",
    _ALL_REDUCE_BYTES: "all_reduce_combine_bytes",
}
# For the compiler itself: whatever goes through jax.jit is cached, counted and logged.
_PROGRAM = b"""
module @nothing {
  func.func public @main() -> tensor<f32> {
    %0 = stablehlo.constant dense<0.0> : tensor<f32>
    return %0 : tensor<f32>
  }
}
"""
_GPU_PLATFORMS = ("gpu", "cuda", "rocm")
_NAME_AND_VALUE = re.compile(r"([A-Za-z]\w*)=(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How the step is compiled and run.

    Raises:
      ValueError: a value out of its range, or xla_options that are not of the form "name=value", come twice or belong
        to another field.

    Example:
      >>> options = CompileOptions(xla_options=("xla_gpu_autotune_level=2",))
      >>> options.compiler_options("gpu", num_devices=8)["xla_gpu_enable_latency_hiding_scheduler"]
      True
      >>> options.compiler_options("cpu", num_devices=8)
      {'xla_gpu_autotune_level': '2'}
    """

    cache_dir: Path | None = dataclasses.field(default_factory=default_compilation_cache)
    """Where compiled programs are kept for the next run, unless JAX is set to keep them elsewhere; None leaves that
    setting as it is."""
    num_threads: int | None = None
    """Threads that compile; None for one per core, or a single one where several processes train."""
    max_live: int | None = None
    """The most executables held at once, the least recently used let go first; None for all. On a processor such
    programs are compiled without the persistent cache, which gives back what cannot be stored again."""
    warm_up: bool = False
    """Run each executable on dummy data before the first step; that needs memory for a second state."""
    fallback: Fallback = "error"
    """A batch that was not planned is refused, or padded up to the nearest larger bucket."""
    time_steps: bool | None = None
    """Measure the seconds of every step; None: where a whole training is run."""
    command_buffers: bool | None = None
    """GPU: launch kernels together, as CUDA graphs; None: on one device only."""
    latency_hiding_scheduler: bool | None = None
    """GPU: overlap communication with computation; None: where there are several devices."""
    all_reduce_combine_bytes: int | None = None
    """GPU: all-reduces are combined up to so many bytes; None leaves it to the compiler."""
    xla_options: tuple[str, ...] = ()
    """More options of the compiler, each as name=value; true and false for what is on or off."""

    def __post_init__(self):
        small = [
            f"{name} ({value!r}) must be at least {least}"
            for name, least in (("num_threads", 1), ("max_live", 1), ("all_reduce_combine_bytes", 0))
            if (value := getattr(self, name)) is not None and value < least
        ]
        if small:
            raise ValueError("; ".join(small))
        if self.fallback not in get_args(Fallback):
            raise ValueError(f"fallback must be one of {', '.join(get_args(Fallback))}, not {self.fallback!r}")
        self._check_xla_options()

    def _check_xla_options(self) -> None:
        """Raises ValueError for options that cannot be told apart, or that a field is there for."""
        odd = [option for option in self.xla_options if not _NAME_AND_VALUE.fullmatch(option)]
        if odd:
            raise ValueError(f"xla_options are of the form name=value, without dashes before the name, not {odd}")
        names = [option.partition("=")[0] for option in self.xla_options]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"xla_options hold {', '.join(twice)} more than once")
        taken = [f"{name}: set {_FIELD_OF_OPTION[name]}" for name in names if name in _FIELD_OF_OPTION]
        if taken:
            raise ValueError(f"xla_options hold what other fields set: {'; '.join(taken)}")

    def compiler_options(self, platform: str, num_devices: int) -> dict[str, OptionValue]:
        """What to hand to `lowered.compile(compiler_options=...)`.

        Graphs pay where launching the kernels takes longer than running them, as on one device with small steps; each
        executable's graph costs device memory. Where there are several devices, steps wait for collectives instead:
        the latency-hiding scheduler, which XLA has off by itself, puts between the start and the end of each what can
        be computed meanwhile, and graphs are off so that their launch order is not in its way.

        A field that is None yields to the same flag in the environment variable `XLA_FLAGS`; a field that is set goes
        before it, but for command buffers that are on: what they hold stays XLA's own choice, or that of the flag.

        Args:
          platform: "gpu", "cuda" or "rocm"; on others, the fields for GPUs say nothing.
          num_devices: how many devices a step runs on, those of other processes included.

        Returns:
          Values by name; `xla_options` come last.
        """
        options: dict[str, OptionValue] = {}
        if platform in _GPU_PLATFORMS:
            command_buffers, latency_hiding = self.command_buffers, self.latency_hiding_scheduler
            if num_devices > 1:
                flags = os.environ.get("XLA_FLAGS", "")
                if command_buffers is None and _COMMAND_BUFFERS not in flags:
                    command_buffers = False
                if latency_hiding is None and _LATENCY_HIDING not in flags:
                    latency_hiding = True
            if command_buffers is False:
                options[_COMMAND_BUFFERS] = ""  # the list of what goes into graphs
            if latency_hiding is not None:
                options[_LATENCY_HIDING] = latency_hiding
            if self.all_reduce_combine_bytes is not None:
                options[_ALL_REDUCE_BYTES] = self.all_reduce_combine_bytes
        named = (option.partition("=") for option in self.xla_options)
        return options | {name: _parse(name, value) for name, _, value in named}


def _parse(name: str, text: str) -> OptionValue:
    """The value as jaxlib takes it: XLA reads text by the option's own type, but knows only "True" and "False"."""
    if name.startswith("xla_"):
        return text.capitalize() if text.lower() in ("true", "false") else text
    for number in (int, float):  # JAX's own options, which it hands on as they are
        try:
            return number(text)
        except ValueError:
            continue
    return text


def check_compiler_options(options: Mapping[str, OptionValue], device: jax.Device) -> None:
    """Compiles a program that does nothing with the options, in some ten milliseconds.

    It goes past JAX's caches, and no event tells of it.

    Args:
      options: what `CompileOptions.compiler_options` gives.
      device: one of this process's.

    Raises:
      ValueError: options that the installed jaxlib does not know, with values that it cannot read, or that it does not
        take together. It lists all of them.
    """
    if not options:
        return
    error = _error_of(options, device)
    if error is None:
        return
    alone = {name: _error_of({name: value}, device) for name, value in options.items()}
    reasons = [
        f"{name}={options[name]!r} ({str(reason).splitlines()[0]})"
        for name, reason in alone.items()
        if reason is not None
    ]
    if not reasons:
        reasons = [f"{', '.join(f'{name}={value!r}' for name, value in options.items())} together ({error})"]
    raise ValueError(f"jaxlib {jaxlib.__version__} does not take these options: {'; '.join(reasons)}") from error


def _error_of(options: Mapping[str, OptionValue], device: jax.Device) -> Exception | None:
    """What jaxlib raises when it compiles with the options."""
    client = device.client
    overrides: dict[str, Any] = dict(options)
    try:
        compile_options = get_compile_options(
            num_replicas=1,
            num_partitions=1,
            device_assignment=np.array([[device]]),
            env_options_overrides=overrides,
            backend=client,
        )
        client.compile_and_load(_PROGRAM, executable_devices=[device], compile_options=compile_options)
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        return error
    return None
