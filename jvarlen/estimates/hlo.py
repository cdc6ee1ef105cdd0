"""The collectives of a compiled program: how many there are, and what each of them reduces or sends."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Integer

from jvarlen._common.checks import UserError

if TYPE_CHECKING:
    import jax

__all__ = [
    "Collective", "Instruction", "arrays_in", "branch_of", "bytes_in", "called_by", "collective_of",
    "computations_of", "ends", "groups_along", "instructions_of", "is_done", "list_collectives",
    "names_in", "operands_of", "starts", "turns_of",
]  # fmt: skip

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# `%name (parameters) -> type {` or `ENTRY %name ... {`, and what such a computation holds, to the brace that ends it.
# What kernels carry along has lines that begin with braces as well.
_COMPUTATION = re.compile(
    r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{$(.*?)^\}(?:$|, execution_thread)", re.MULTILINE | re.DOTALL
)
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|[a-z_]+_computation)=%?([\w.\-]+)")
_LISTED = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
# `%name = type operation(operands), attributes`.
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$", re.MULTILINE)
_CONTINUED = re.compile(r"\n(?!\s*(?:ROOT )?%?\S+ = )")
# Matrix products (convolutions for TPUs) and the kernels of cuBLAS, cuDNN and Pallas, which mostly compute some.
_PRODUCT = re.compile(
    r" (?:dot|convolution)\(|custom_call_target=\"[^\"]*(?:cublas|cudnn|onednn|triton|mosaic|tpu_custom_call)"
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_LOOP = re.compile(
    r"\bwhile\((?:[^%\n]* )?%?([\w.\-]+)\), condition=%?([\w.\-]+), body=%?([\w.\-]+)(.*)$", re.MULTILINE
)
# A loop of one turn or none of a program with stages, by its scope: what each does in a tick, and parts of it.
_BRANCH = re.compile(r'\bop_name="[^"]*\bbranch(\d*)/while"')
# And one that sends, in ticks in which a stage takes that branch.
_SENDS = re.compile(r'\bop_name="[^"]*\bsends(\d+)/while"')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# `%name = integer operation(operands), attributes`, and the operands of tuples.
_SCALAR = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (?:[su]\d+|pred)\[\]\S* ([\w\-]+)\((.*?)\)(.*)$", re.MULTILINE)
_TUPLE = re.compile(r"^\s*(?:ROOT )?%?(\S+) = \(.*\) tuple\((.*?)\)(?:, .*)?$", re.MULTILINE)
_TAKEN = re.compile(r"^\s*%?(\S+) = \(.*\) parameter\(0\)", re.MULTILINE)
_ROOT = re.compile(r"^\s*ROOT %?(\S+) = ", re.MULTILINE)
_NAME = re.compile(r"%([\w.\-]+)")
_LISTED_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_STRIDED_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_WAITS = '"is_sync":true'  # of GPUs: done as soon as it starts; older versions of XLA write both all the same
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


class Collective(NamedTuple):
    """One collective of a program."""

    kind: str  # as XLA names it, such as "all-reduce"
    num_bytes: int  # of all arrays: an all-reduce's or all-gather's results, a reduce-scatter's operands, or a message
    groups: tuple[tuple[int, ...], ...]  # devices, by their place in the mesh; of permutes, pairs of source and target
    times: int | None  # in a step, loops multiplied out; None where XLA does not know how often a loop runs
    is_asynchronous: bool = False  # whether it has a start and a done, between which something else may run
    products: int = 0  # matrix products, kernels and loops of them that are scheduled between start and done


class Instruction(NamedTuple):
    """A line of a computation."""

    is_root: bool
    name: str
    shapes: str  # of its result
    operation: str
    rest: str  # operands and attributes


def computations_of(text: str) -> dict[str, str]:
    """The computations of a program by name, as lines of text; that of the whole is the last."""
    return {name: _restore_scatter(name, body) for name, body in _COMPUTATION.findall(text)}


def _restore_scatter(name: str, body: str) -> str:
    """The lines, with a reduce-scatter in place of the all-reduce and the slice by which programs for TPUs write it."""
    if not name.startswith("all-reduce-scatter"):
        return body
    shapes = instructions_of(body)[-1].shapes
    return re.sub(r"= \S+ all-reduce\(", lambda _: f"= {shapes} reduce-scatter(", body)


def instructions_of(body: str) -> list[Instruction]:
    """The instructions of a computation; in a compiled program, in the order in which they run."""
    whole = _CONTINUED.sub(" ", body)  # what kernels carry along breaks lines
    return [Instruction(bool(root), *rest) for root, *rest in _INSTRUCTION.findall(whole)]


def collective_of(each: Instruction) -> Collective | None:
    """The collective that an instruction is or starts, counted once, or None."""
    kind = each.operation.removesuffix("-start")
    if kind not in _KINDS:
        return None
    groups = _groups_of(kind, each.rest)
    return Collective(kind, _num_bytes(kind, each.shapes, kind != each.operation, groups), groups, 1)


def names_in(text: str) -> list[str]:
    """The names of instructions and computations, in order."""
    return _NAME.findall(text)


def operands_of(each: Instruction) -> list[str]:
    """The names of what an instruction takes."""
    return names_in(each.rest.partition(")")[0])


def arrays_in(shapes: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays of a type: dtype and dimensions."""
    return [(dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in _ARRAY.findall(shapes)]


def bytes_in(shapes: str) -> int:
    """Bytes of all arrays of a type."""
    return sum(_bytes_of(dtype, dims) for dtype, dims in _ARRAY.findall(shapes))


def list_collectives(
    executable: jax.stages.Compiled | str, ticks: Integer[np.ndarray, "T S"] | None = None
) -> list[Collective]:
    """The collectives of a compiled program, asynchronous ones once; `ticks` are those of `branches_of_ticks`."""
    text = executable if isinstance(executable, str) else executable.as_text()
    if not text:
        raise UserError("this program has no text: compile it here to count its collectives")
    bodies = computations_of(text)
    times = _times_of(bodies, ticks)
    listed = {name: instructions_of(body) for name, body in bodies.items()}

    @functools.cache
    def has_product(name: str) -> bool:
        return bool(_PRODUCT.search(bodies[name])) or any(map(has_product, called_by(bodies[name]) & bodies.keys()))

    def is_product(each: Instruction) -> bool:
        line = f" {each.operation}({each.rest}"
        return bool(_PRODUCT.search(line)) or any(map(has_product, called_by(line) & bodies.keys()))

    # Where a start only calls a computation that holds the collective, and how many products run until it is done.
    started: dict[str, int] = {}
    done: set[str] = set()
    between: dict[str, int] = {}  # of starts, by name
    for instructions in listed.values():
        for i, each in enumerate(instructions):
            if ends(each):
                done |= called_by(each.rest)
            if not starts(each):
                continue
            following = instructions[i + 1 :]
            end = next((j for j, later in enumerate(following) if is_done(later, each)), 0)
            between[each.name] = sum(map(is_product, following[:end]))
            started |= dict.fromkeys(called_by(each.rest), between[each.name])
    found = []
    for name, instructions in listed.items():
        # In programs for TPUs, a collective that runs beside something else stands in three places: where it starts, in
        # a fusion with that, and where it is done.
        if name in done - started.keys() or name.startswith("async_collective_fusion"):
            continue
        for each in instructions:
            if (collective := collective_of(each)) is None:
                continue
            products = between[each.name] if each.operation.endswith("-start") else started.get(name)
            if products is not None and _WAITS not in each.rest:
                collective = collective._replace(is_asynchronous=True, products=products)
            found.append(collective._replace(times=times[name]))
    return found


def starts(each: Instruction) -> bool:
    """Whether this starts what runs beside what follows."""
    return each.operation.endswith("-start") or each.name.startswith("async-collective-start")


def ends(each: Instruction) -> bool:
    """Whether this waits for something that has been started."""
    return each.operation.endswith("-done") or each.name.startswith("async-collective-done")


def is_done(later: Instruction, start: Instruction) -> bool:
    """Whether this waits for what has been started."""
    if start.operation == "fusion":
        return later.name == start.name.replace("-start", "-done")
    return later.operation.endswith("-done") and _NAME.findall(later.rest)[:1] == [start.name]


def branch_of(attributes: str) -> int | None:
    """The branch of a tick that a loop computes, 0 for a part of a branch; None for other loops."""
    found = _BRANCH.search(attributes)
    return int(found[1] or 0) if found else None


def turns_of(
    bodies: Mapping[str, str], ticks: Integer[np.ndarray, "T S"] | None = None
) -> dict[tuple[str, str], float]:
    """The turns of each loop, by the computation that holds it and its body; NaN: unknown.

    Branches of ticks count as often as in the stage that takes them most, and parts of them as if they were taken.
    """
    turns: dict[tuple[str, str], float] = {}
    for name, body in bodies.items():
        for carried, condition, loop, attributes in _LOOP.findall(body):
            if ticks is not None and (branch := branch_of(attributes)) is not None:
                turns[name, loop] = np.mean(ticks == branch, axis=0).max() if branch else 1
                continue
            if ticks is not None and (sends := _SENDS.search(attributes)):
                turns[name, loop] = np.mean((ticks == int(sends[1])).any(axis=1))
                continue
            found = _TRIP_COUNT.search(attributes)
            known = int(found[1]) if found else _count_turns(body, carried, bodies[condition], bodies[loop])
            turns[name, loop] = math.nan if known is None else known
    return turns


def _times_of(bodies: Mapping[str, str], ticks: Integer[np.ndarray, "T S"] | None = None) -> dict[str, int | None]:
    """How often each computation runs in a step, branches as if all were taken; None means unknown."""
    turns = turns_of(bodies, ticks)
    callers: dict[str, set[str]] = {name: set() for name in bodies}
    for name, body in bodies.items():
        for called in called_by(body) & bodies.keys():
            callers[called].add(name)

    @functools.cache
    def times_of(name: str) -> float:
        if not callers[name]:
            return 1
        return sum(times_of(caller) * turns.get((caller, name), 1) for caller in callers[name])

    return {name: None if math.isnan(times_of(name)) else round(times_of(name)) for name in bodies}


def _count_turns(caller: str, carried: str, condition: str, loop: str) -> int | None:
    """The turns of a loop that counts from a constant up to another one by one, where XLA does not say; else None."""
    around, test, turn = map(_Scalars, (caller, condition, loop))
    compare, compared, attributes = test.operation(test.root)
    if compare != "compare" or "direction=LT" not in attributes or carried not in around.tuples:
        return None
    (kind, place), (end_kind, last) = map(test.source, names_in(compared))
    if kind != "place" or end_kind != "constant" or turn.root not in turn.tuples:
        return None
    begin_kind, first = around.source(around.tuples[carried][place])
    add, added, _ = turn.operation(turn.tuples[turn.root][place])
    counts_by_one = add == "add" and {*map(turn.source, names_in(added))} == {("constant", 1), ("place", place)}
    return max(last - first, 0) if counts_by_one and begin_kind == "constant" else None


class _Scalars:
    """The integers of a computation by name, and its tuples."""

    def __init__(self, body: str):
        self._found = {name: (kind, operands, rest) for name, kind, operands, rest in _SCALAR.findall(body)}
        self.tuples = {name: names_in(operands) for name, operands in _TUPLE.findall(body)}
        self.root = _ROOT.findall(body)[-1]
        self._argument = _TAKEN.findall(body)

    def operation(self, name: str) -> tuple[str, str, str]:
        """The operation that gives a number, through copies of it, with its operands and attributes."""
        kind, operands, attributes = self._found.get(name, ("", "", ""))
        if kind in ("copy", "bitcast"):
            return self.operation(names_in(operands)[0])
        return kind, operands, attributes

    def source(self, name: str) -> tuple[str, int]:
        """("constant", value); ("place", index) for a number in the tuple that the computation takes; or ("", 0)."""
        kind, operands, attributes = self.operation(name)
        if kind == "constant" and re.fullmatch(r"-?\d+", operands):
            return "constant", int(operands)
        place = re.search(r"index=(\d+)", attributes)
        return ("place", int(place[1])) if place and names_in(operands) == self._argument else ("", 0)


def _num_bytes(kind: str, shapes: str, is_start: bool, groups: tuple[tuple[int, ...], ...]) -> int:
    """Bytes of the whole array, from the shapes of the result."""
    arrays = _ARRAY.findall(shapes)
    if is_start and (kind != "all-reduce" or shapes.startswith("((")):
        # Operands, results, and flags of completion; for all-reduces since JAX 0.12.
        arrays = [each for each in arrays if each != ("u32", "")]
        arrays = arrays[len(arrays) // 2 :]
    sizes = [_bytes_of(*each) for each in arrays]
    return sum(sizes) * (len(groups[0]) if kind == "reduce-scatter" else 1)


def _bytes_of(dtype: str, dims: str) -> int:
    bits = re.match(r"[a-z]+(\d+)", dtype)  # pred has none, and takes a byte
    return math.prod(map(int, filter(None, dims.split(",")))) * (int(bits[1]) if bits else 8) // 8


def _groups_of(kind: str, attributes: str) -> tuple[tuple[int, ...], ...]:
    listed = (_PAIRS if kind == "collective-permute" else _LISTED_GROUPS).search(attributes)
    if listed and listed[1]:
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if found := _STRIDED_GROUPS.search(attributes):
        return _rows(_arrange_devices(found[3], found[4]).reshape(int(found[1]), int(found[2])))
    if found := _MESH_GROUPS.search(attributes):
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        sizes = list(axes.values())
        devices = _arrange_devices(found[2], found[3]) if found[2] else np.arange(math.prod(sizes))
        along = [list(axes).index(name) for name in re.findall(r"'([^']+)'", found[4])]
        return groups_along(devices.reshape(sizes), along)
    raise UserError(f"the devices of this {kind} are listed in an unknown form: {attributes[:200]}")


def _arrange_devices(sizes: str, transposed: str | None) -> np.ndarray:
    """Devices by number, in such an array."""
    shape = list(map(int, sizes.split(",")))
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices.transpose(list(map(int, transposed.split(",")))) if transposed else devices


def groups_along(devices: np.ndarray, dims: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The devices of a mesh that differ along these dimensions alone, group by group."""
    moved = np.moveaxis(devices, dims, range(-len(dims), 0))
    return _rows(moved.reshape(-1, math.prod(devices.shape[dim] for dim in dims)))


def _rows(devices: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, devices.tolist()))


def called_by(body: str) -> set[str]:
    """The computations that these lines call, by name."""
    listed = {name.strip().lstrip("%") for names in _LISTED.findall(body) for name in names.split(",")}
    return listed | set(_CALLED.findall(body))
