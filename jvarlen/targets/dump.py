"""What XLA writes down while it compiles: the program, its buffers, and what is launched."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import NamedTuple

from jvarlen.compiling.lowering import CompiledBucket, LoweredBucket, StepCompiler

__all__ = ["Dump", "compile_with_dump"]

_FILES = {
    "buffers": "*after_optimizations-buffer-assignment.txt",
    "lifetimes": "*after_optimizations-live-range.txt",
    "launches": "*.thunk_sequence.txt",
    "launch_names": "*.thunk_metadata.txt",
}


class Dump(NamedTuple):
    """Texts of XLA about a program; empty where its backend writes none."""

    program: str  # optimized and scheduled HLO
    buffers: str = ""  # each allocation, with the values that lie in it and where
    lifetimes: str = ""  # of each of those values: when it begins and ends
    launches: str = ""  # of GPUs: what the host launches, in order and by number
    launch_names: str = ""  # of those: the instructions of the program, by number


def compile_with_dump(compiler: StepCompiler, lowered: LoweredBucket) -> tuple[CompiledBucket, Dump]:
    """Compiles a program, and reads what XLA writes down meanwhile."""
    with tempfile.TemporaryDirectory(prefix="jvarlen-") as directory:
        options = {
            **compiler.compiler_options,
            "xla_dump_to": directory,
            "xla_dump_hlo_as_text": True,
        }
        compiled = dataclasses.replace(compiler, compiler_options=options).compile(lowered)
        # Of all programs that are compiled for it, the step's is the largest.
        written = {name: sorted(Path(directory).glob(pattern), key=_size) for name, pattern in _FILES.items()}
        texts = {name: paths[-1].read_text() for name, paths in written.items() if paths}
        if written["launches"]:  # which a pass that makes CUDA graphs of them writes anew
            again = str(written["launches"][-1]).replace(".thunk_sequence.", ".thunk_sequence_after_thunk_passes.")
            texts["launches"] = Path(again).read_text() if Path(again).exists() else texts["launches"]
    return compiled, Dump(compiled.executable.as_text() or "", **texts)


def _size(path: Path) -> int:
    return path.stat().st_size
