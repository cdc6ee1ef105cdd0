"""The texts that XLA writes while it compiles: the program, its buffers, and the launches of a GPU's host."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from jvarlen.compiling.lowering import CompiledProgram, LoweredProgram, StepCompiler

__all__ = ["Dump", "Launches", "compile_with_dump", "count_launches"]

_FILES = {
    "buffers": "*after_optimizations-buffer-assignment.txt",
    "lifetimes": "*after_optimizations-live-range.txt",
    "launches": "*.thunk_sequence.txt",
    "launch_names": "*.thunk_metadata.txt",
}
# `  012: kCopy [prev=… | next=…] …`, by its indent inside of what holds it; and the parts of a loop.
_LINE = re.compile(r"^( *)0*(\d+): k(\w+)|^ *(condition|body):$", re.MULTILINE)
_NAMED = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
_TURNS = re.compile(r'^\s*(?:ROOT )?%?(\S+) = .* while\(.*"known_trip_count":\{"n":"(\d+)"', re.MULTILINE)
_COLLECTIVE = re.compile(r"(?:Nvshmem)?(?:All|Collective|Ragged|Recv|ReduceScatter|Send)")
_COPY = re.compile(r"\w*(?:Copy|Mem)")
_NO_LAUNCH = re.compile(r"AsyncStart|DynamicSliceFusion|Group|Sequential|WaitForStreams|\w*Done")  # hold some, or wait


class Dump(NamedTuple):
    """Texts of XLA about a program; empty where its backend writes none."""

    program: str  # optimized and scheduled HLO
    buffers: str = ""  # each allocation, with its values and their offsets
    lifetimes: str = ""  # when each of those values begins and ends
    launches: str = ""  # of the host of GPUs, in order and by number
    launch_names: str = ""  # the instructions of the program for these, by number


def compile_with_dump(compiler: StepCompiler, lowered: LoweredProgram) -> tuple[CompiledProgram, Dump]:
    """Compiles a program, and reads the texts that XLA writes meanwhile."""
    with tempfile.TemporaryDirectory(prefix="jvarlen-") as directory:
        options = {**compiler.compiler_options, "xla_dump_to": directory, "xla_dump_hlo_as_text": True}
        compiled = dataclasses.replace(compiler, compiler_options=options).compile(lowered)
        # Among the programs that are compiled for it, the step's is the largest.
        written = {
            name: sorted(Path(directory).glob(pattern), key=lambda path: path.stat().st_size)
            for name, pattern in _FILES.items()
        }
        texts = {name: paths[-1].read_text() for name, paths in written.items() if paths}
        if written["launches"]:  # rewritten by a pass that makes CUDA graphs of them
            again = str(written["launches"][-1]).replace(".thunk_sequence.", ".thunk_sequence_after_thunk_passes.")
            texts["launches"] = Path(again).read_text() if Path(again).exists() else texts["launches"]
    return compiled, Dump(compiled.executable.as_text() or "", **texts)


class Launches(NamedTuple):
    """The launches of a GPU's host in a step, loops multiplied out.

    Attributes:
      kernels: outside of CUDA graphs, one by one.
      copies: outside of CUDA graphs, fills included.
      collectives: outside of CUDA graphs.
      graphs: CUDA graphs (command buffers of XLA), each time that one is launched.
    """

    kernels: int
    copies: int
    collectives: int
    graphs: int


def count_launches(dump: Dump) -> Launches | None:
    """Counts what the host launches in a step; None for TPUs and CPUs, and with branches or unknown turns."""
    names = {number: name for name, number in _NAMED.findall(dump.launch_names)}
    turns = {name: int(number) for name, number in _TURNS.findall(dump.program)}
    counts: Counter[str] = Counter()
    outer = [(-1, 1)]  # the indents of what holds the next line, and how often a step runs it
    is_condition = False  # of a loop whose turns are known: not run
    lines = _LINE.findall(dump.launches)
    for indent, number, kind, part in lines:
        if part or is_condition:
            is_condition = part == "condition" if part else is_condition
            continue
        while outer[-1][0] >= len(indent):
            outer.pop()
        times = outer[-1][1]
        if kind == "CommandBuffer":
            counts["graphs"] += times
            times = 0
        elif kind == "While" and times:
            if (of_loop := turns.get(names.get(number, ""))) is None:
                return None
            times *= of_loop
        elif kind == "Conditional" and times:
            return None
        elif kind != "While" and not _NO_LAUNCH.match(kind):
            what = "collectives" if _COLLECTIVE.match(kind) else "copies" if _COPY.match(kind) else "kernels"
            counts[what] += times
        outer.append((len(indent), times))
    return Launches(*(counts[name] for name in Launches._fields)) if lines else None
