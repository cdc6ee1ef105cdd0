"""The largest buffers of a compiled program, and the line of Python that made each."""

from __future__ import annotations

import itertools
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jvarlen.estimates.hlo import Instruction, called_by, computations_of, instructions_of, operands_of
from jvarlen.targets.dump import Dump

__all__ = ["Buffer", "allocated_bytes", "largest_buffers"]

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*):\n((?: value: .*\n?)*)", re.MULTILINE)
_VALUE = re.compile(r"^ value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$", re.MULTILINE)
_SCHEDULED = re.compile(r"^ +\d+:(\S+)$", re.MULTILINE)
_LIFETIME = re.compile(r"^ +(\S+):(\d+)-(\d+)$", re.MULTILINE)
_SHAPE = re.compile(r"\w+\[[\d,]*\]")
_CALLED = re.compile(r"\b(?:body|calls|to_apply)=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
# Operations that pass a value on; and where JAX stacks values of the turns of a loop.
_MOVES = {"bitcast", "convert", "copy", "copy-done", "copy-start", "optimization-barrier", "reshape", "transpose"}
_STACKS = re.compile(r"/while/body/(?:jit\(dynamic_update_index_in_dim\)/)?dynamic_update_slice$")
_TRANSFORMS = re.compile(r"\b(?:jit|jvp|transpose|vmap)\(|[()]")
_STRUCTURE = {"", "body", "branch", "checkpoint", "closed_call", "cond", "rematted_computation", "shard_map", "while"}
_TRACING = "/jvarlen/compiling/lowering.py"  # calls the step to trace it; its callers made no array
_HERE = str(Path(__file__).parents[1])
_INSTALLED = ("/site-packages/", "/dist-packages/", sysconfig.get_path("stdlib"), _HERE)


class Buffer(NamedTuple):
    """Bytes of a device that a step holds at its fullest moment.

    Attributes:
      num_bytes: as allocated, with padding.
      kind: `"argument"`, `"output"` or `"temporary"`.
      shape: type and dimensions on a device, as XLA writes them: `bf16[2,512,1376]`.
      operation: JAX's name of the operation that made it, or XLA's where JAX has none; the name of an argument, such as
        `state.params['embed']`.
      source: the line that made it, as `file:line function`: the innermost outside of installed packages, or else of
        this library; None for arguments, and where it is unknown.
    """

    num_bytes: int
    kind: str
    shape: str
    operation: str
    source: str | None


class _Value(NamedTuple):
    """An array of a program in the memory of an allocation."""

    name: str
    shape: str
    offset: int
    num_bytes: int
    begin: int = 0  # of its life, by the order in which the program runs
    end: int = 0


def largest_buffers(dump: Dump, most: int = 10) -> tuple[Buffer, ...] | None:
    """The largest buffers of a device at the fullest moment of a step, the largest first.

    These are arguments, which are held all the time, results that replace no argument, and the memory of temporaries at
    that moment: arrays in the same bytes are one buffer, with the name of the largest. Only the main memory of the
    device counts, neither a TPU's vector memory nor the host's.

    None where XLA does not list when arrays are held.
    """
    found = _LIFETIME.findall(dump.lifetimes)
    lifetimes = {name.removesuffix("{}"): (int(begin), int(end)) for name, begin, end in found}
    if not lifetimes:
        return None
    program = _Program(dump.program, _SCHEDULED.findall(dump.lifetimes))
    held: list[tuple[int, str, _Value]] = []
    arena: list[_Value] = []
    arena_bytes = 0
    for size, what, listed in _ALLOCATION.findall(dump.buffers):
        values = [
            _Value(name.removesuffix("{}"), shape, arena_bytes + int(offset), int(num_bytes))
            for name, num_bytes, offset, shape in _VALUE.findall(listed)
        ]
        if not values or ", color " in what:
            continue
        if "preallocated-temp" in what:
            arena += [_Value(*value[:4], *lifetimes[value.name]) for value in values if value.name in lifetimes]
            arena_bytes += int(size)
        elif ", parameter " in what:
            given = next(value for value in values if value.name in program.arguments)
            held.append((int(size), "argument", given))
        elif "maybe-live-out" in what:
            held.append((int(size), "output", values[-1]))
    held += _parts_at_the_peak(arena)
    held.sort(key=lambda each: (-each[0], each[1], each[2].name))
    buffers = []
    for num_bytes, kind, value in held[:most]:
        operation, source = program.operation_and_source(value.name, is_argument=kind == "argument")
        shape = _SHAPE.match(value.shape)
        buffers.append(Buffer(num_bytes, kind, shape[0] if shape else value.shape, operation, source))
    return tuple(buffers)


def allocated_bytes(dump: Dump) -> int:
    """Bytes that a program allocates for temporaries in a device's main memory."""
    found = _ALLOCATION.findall(dump.buffers)
    return sum(int(size) for size, what, _ in found if "preallocated-temp" in what and ", color " not in what)


def _parts_at_the_peak(arena: list[_Value]) -> Iterator[tuple[int, str, _Value]]:
    """The parts of the memory of temporaries in use when most of it is."""
    arena = sorted(arena, key=lambda value: value.offset)
    if not arena:
        return
    offsets, sizes, begins, ends = (np.array([value[i] for value in arena], np.int64) for i in (2, 3, 4, 5))
    changes = np.zeros(ends.max() + 2, np.int64)
    np.add.at(changes, begins, sizes)
    np.add.at(changes, ends + 1, -sizes)
    at_most = np.cumsum(changes)  # bytes at each moment if no two arrays lay in the same
    most, peak = -1, 0
    for moment in sorted({*begins.tolist()}, key=lambda moment: -at_most[moment]):
        if at_most[moment] <= most:
            break
        live = (begins <= moment) & (moment <= ends)
        first, stops = offsets[live], np.maximum.accumulate(offsets[live] + sizes[live])
        taken = stops[-1] - first[0] - np.maximum(first[1:] - stops[:-1], 0).sum()
        most, peak = max((most, peak), (taken, moment))
    live = (begins <= peak) & (peak <= ends)
    stops = np.maximum.accumulate(offsets[live] + sizes[live])
    places = np.split(np.flatnonzero(live), np.flatnonzero(offsets[live][1:] >= stops[:-1]) + 1)
    for place in places:
        begin, end = int(offsets[place[0]]), int((offsets + sizes)[place].max())
        largest = arena[max(place, key=lambda i: sizes[i])]
        yield end - begin, "temporary", largest


class _Program:
    """The instructions of a program by name, and the lines of Python that they come from."""

    def __init__(self, text: str, scheduled: list[str]):
        self._found: dict[str, tuple[Instruction, str]] = {}  # with the computation that holds it
        self._roots: dict[str, str] = {}
        self._callers: dict[str, Instruction] = {}  # of computations
        for home, body in computations_of(text).items():
            for each in instructions_of(body):
                self._found[each.name] = each, home
                if each.is_root:
                    self._roots[home] = each.name
                if each.operation != "conditional":  # each branch gets another operand
                    self._callers |= dict.fromkeys(called_by(each.rest), each)
        self.arguments = {
            name for name, (each, of) in self._found.items() if each.operation == "parameter" and of == home
        }
        # The instruction inside a start is not printed; it is scheduled right before the start.
        for name, start in itertools.pairwise(scheduled):
            if start.endswith("-start") and start in self._found:
                self._found.setdefault(name, self._found[start])
        self._files, self._functions, self._lines, self._frames = (
            dict(re.findall(r"^(\d+) (.*)$", table[1], re.MULTILINE)) if table else {}
            for table in (
                re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
                for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
            )
        )

    def operation_and_source(self, value: str, is_argument: bool) -> tuple[str, str | None]:
        """The operation and the line that made an array."""
        name, _, element = value.partition("{")
        index = tuple(map(int, filter(None, element.rstrip("}").split(","))))
        if is_argument:
            return _op_name(self._found[name][0]) or name, None
        named = [(_readable(_op_name(each)), each.name, *self._source(each)) for each in self._makers(name, index)]
        for is_outside in (True, False):
            for operation, hlo_name, source, outside in named:
                if source and outside is is_outside:
                    return operation or hlo_name, source
        return next((operation for operation, *_ in named if operation), name), None

    def _makers(self, name: str, index: tuple[int, ...]) -> Iterator[Instruction]:
        """The instructions that made an array, through those that only passed it on: the most telling first."""
        seen = set()
        last = []  # loops and the like, whose bodies say more
        waiting = [(name, index)]
        while waiting:
            name, index = waiting.pop()
            if (name, index) in seen or name not in self._found:
                continue
            seen.add((name, index))
            each, home = self._found[name]
            operands = operands_of(each)
            called, caller = _CALLED.search(each.rest), self._callers.get(home)
            match each.operation:
                case "get-tuple-element":
                    place = re.search(r"\bindex=(\d+)", each.rest)
                    waiting.append((operands[0], (int(place[1]) if place else 0, *index)))
                case "tuple" if index:
                    waiting.append((operands[index[0]], index[1:]))
                case "while" | "call" | "fusion" if called:
                    last.append(each)
                    waiting.append((self._roots[called[1]], index))
                case "parameter" if caller is not None:
                    number = int(each.rest.partition(")")[0])
                    waiting.append((operands_of(caller)[number], index))
                    if caller.operation == "while":  # results of a turn, before inputs of the first one
                        waiting += [(self._roots[body], index) for body in _CALLED.findall(caller.rest)]
                case "dynamic-update-slice" if _STACKS.search(_op_name(each)):
                    last.append(each)
                    waiting.append((operands[1], ()))
                case operation:
                    yield each
                    if operation in _MOVES:
                        waiting.append((operands[0], () if operation.startswith("copy-") else index))
        yield from last

    def _source(self, each: Instruction) -> tuple[str | None, bool]:
        """The line that an instruction comes from, and whether that is outside of installed packages."""
        frame, here = re.search(r"stack_frame_id=(\d+)", each.rest), None
        number = int(frame[1]) if frame else 0
        while number and (location := self._frames.get(str(number))):
            line = self._lines[re.findall(r"file_location_id=(\d+)", location)[0]]
            file, function, at = re.findall(r"file_name_id=(\d+) function_name_id=(\d+) line=(\d+)", line)[0]
            path = self._files[file].strip('"')
            if path.endswith(_TRACING):
                break
            said = f"{_short(path)}:{at} {self._functions[function].strip(chr(34)).replace('<locals>.', '')}"
            if not any(place in path for place in _INSTALLED):
                return said, True
            if here is None and path.startswith(_HERE):
                here = said
            # XLA writes the number of the frame that calls this one plus one.
            parent = re.search(r"parent_frame_id=(\d+)", location)
            number = int(parent[1]) - 1 if parent else 0
        return here, False


def _short(path: str) -> str:
    """Relative to the working directory, or to this library's."""
    for folder in (Path.cwd(), Path(_HERE).parent):
        if Path(path).is_relative_to(folder):
            return str(Path(path).relative_to(folder))
    return path


def _op_name(each: Instruction) -> str:
    """JAX's name of an operation, with all that it is in."""
    found = _OP_NAME.search(each.rest)
    return found[1].replace("\\", "") if found else ""


def _readable(op_name: str) -> str:
    """The operation and the function that it is in, and whether it computes gradients."""
    parts = [_TRANSFORMS.sub("", part) for part in op_name.split("/")[1:]]
    said = "/".join([part for part in parts if part not in _STRUCTURE][-2:])
    return f"{said} (backward)" if said and "transpose(" in op_name else said
