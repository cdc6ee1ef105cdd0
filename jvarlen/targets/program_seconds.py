"""Seconds of a step, predicted from its compiled program: its schedule, priced by a device's rates."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from jvarlen.estimates import hlo
from jvarlen.estimates.cluster import Cluster, Kind

__all__ = ["ProgramSeconds", "program_seconds"]

_KINDS: dict[str, Kind] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_gather",  # a device sends as many bytes
    "ragged-all-to-all": "all_gather",
    "collective-permute": "send",
}
# Products of all queries and keys in kernels of attention: dq and dkv each compute scores and their gradient again.
_PRODUCTS = {
    "__cudnn$fmhaSoftmax": 2,
    "__cudnn$fmhaSoftmaxBackward": 5,
    "_forward_kernel": 2,
    "_dq_kernel": 3,
    "_dkv_kernel": 4,
    "splash_mha_fwd": 2,
    "splash_mha_dq": 3,
    "splash_mha_dkv": 4,
}
_KERNEL = re.compile(r'custom_call_target="(__cudnn\$\w+|[^"]*triton|[^"]*mosaic\w*|tpu_custom_call)"')
_KERNEL_NAME = re.compile(r'\bname = \\?"(\w+)')
_SPLASH = re.compile(r"(splash_mha_(?:fwd|dq|dkv))_")
_MATMUL = re.compile(r'custom_call_target="__cublas\$[\w$]*(?:gemm|matmul)')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
# Operations that take no time: names, and copies that run beside kernels, such as those into the VMEM of a TPU.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "optimization-barrier", "copy-start", "copy-done", "slice-start", "slice-done", "add-dependency",
    "async-update", "domain", "iota",
}  # fmt: skip
_OF_VMEM = ("AllocateBuffer", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked", "Sharding")
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "convert", "copy", "reshape", "transpose")
_HOST_MEMORY = "S(5)"
# Operations a second of our Triton kernels beside cuDNN's: 404 and 522 TFLOP/s in a step of 16 × 4,096 on an H200.
_TRITON = 0.77
# Products of float32 beside those of bfloat16. GPUs compute them as TF32 at half the rate, by NVIDIA's data sheets, and
# exactly at a sixteenth; TPUs by one pass of bfloat16 or by six.
_FLOAT32_SHARES_OF_GPUS, _FLOAT32_SHARES_OF_TPUS = (1 / 2, 1 / 16), (1.0, 1 / 6)


class ProgramSeconds(NamedTuple):
    """An estimate of the seconds of a program.

    Attributes:
      total: of one run.
      exposed: seconds in which a device waits for communication.
      products: seconds of products, convolutions and kernels of attention.
      elementwise_bytes: that other kernels read and write.
      kernels: how many run.
    """

    total: float = 0.0
    exposed: float = 0.0
    products: float = 0.0
    elementwise_bytes: float = 0.0
    kernels: float = 0.0


class _UnknownError(Exception):
    """An operation of unknown seconds."""


def program_seconds(
    text: str,
    cluster: Cluster,
    *,
    is_tpu: bool,
    hosts: Sequence[int],
    ticks: Integer[np.ndarray, "T S"] | None = None,
    length: int | None = None,
) -> ProgramSeconds | None:
    """Predicts the seconds of a compiled program. Its instructions run one after another in the order of its schedule.

    - Products of matrices, convolutions and kernels of attention take their operations over the share of the peak that
      `cluster` says; attention counts as in full rows of one sample, half of the pairs where it is causal. Where
      reading and writing takes longer, that counts.
    - Other kernels take the bytes that they read and write, a slice those of the slice, over the bandwidth that they
      reach. Every kernel takes `cluster.kernel_s` more.
    - Collectives take `Cluster.collective_seconds`, one at a time. An asynchronous one runs beside the
      instructions between its start and its done, and the rest is exposed. Others are exposed whole.
    - Loops are multiplied out. The longest branch counts, and in a tick the stage that takes longest.

    `hosts` are the hosts of the devices in the order of the mesh; `ticks` are `branches_of_ticks`; `length` is that
    of a row, of which splash attention joins several. None with loops that turn by values, unknown kernels, and
    activations in the memory of the host.
    """
    if _HOST_MEMORY in text:
        return None
    try:
        program = _Program(text, cluster, is_tpu, hosts, ticks, length)
        return program.seconds(program.whole)
    except _UnknownError:
        return None


class _Program:
    """The computations of a program, and the seconds of each on a cluster."""

    def __init__(
        self,
        text: str,
        cluster: Cluster,
        is_tpu: bool,
        hosts: Sequence[int],
        ticks: np.ndarray | None,
        length: int | None,
    ) -> None:
        self._bodies = hlo.computations_of(text)
        self.whole = list(self._bodies)[-1]
        self._turns = hlo.turns_of(self._bodies, ticks)
        self._cluster, self._hosts, self._ticks, self._length = cluster, hosts, ticks, length
        self._float32_shares = _FLOAT32_SHARES_OF_TPUS if is_tpu else _FLOAT32_SHARES_OF_GPUS
        self._listed = {name: hlo.instructions_of(body) for name, body in self._bodies.items()}
        self._by_name = {name: {each.name: each for each in listed} for name, listed in self._listed.items()}
        self.users = functools.cache(self._users)
        self.seconds = functools.cache(self._seconds)
        self.matrix_s = functools.cache(self._matrix_s)
        self.collectives = functools.cache(self._collectives)

    def _seconds(self, name: str) -> ProgramSeconds:
        """Seconds of one run of a computation, whose instructions are scheduled."""
        taken, link_is_free = ProgramSeconds(), 0.0
        of_tick: dict[int, ProgramSeconds] = {}  # by branch
        running: dict[str, tuple[hlo.Instruction, float]] = {}
        for each in self._listed[name]:
            inner = self._called_by(each)
            if each.operation == "while":
                body = next(called for called in inner if (name, called) in self._turns)
                if self._ticks is not None and (branch := hlo.branch_of(each.rest)):
                    before = self._of_tick(of_tick)
                    of_tick[branch] = self.seconds(body)
                    took = ProgramSeconds(*np.subtract(self._of_tick(of_tick), before).tolist())
                else:
                    turns = self._turns[name, body]
                    if math.isnan(turns):
                        raise _UnknownError
                    took = ProgramSeconds(*(turns * s for s in self.seconds(body)))
            elif each.operation == "conditional":
                took = max(self.seconds(branch) for branch in inner)
            elif each.operation == "call":
                took = self.seconds(inner[0])
            elif ended := [start for start, _ in running.values() if hlo.is_done(each, start)]:
                waited = max(running.pop(ended[0].name)[1] - taken.total, 0.0)
                took = ProgramSeconds(waited, waited)
            else:
                communicates = sum(map(self._collective_s, self._started_by(each, inner)))
                if communicates and hlo.starts(each):
                    link_is_free = max(taken.total, link_is_free) + communicates
                    running[each.name] = each, link_is_free
                    continue
                took = ProgramSeconds() if hlo.starts(each) else self._kernel(name, each, inner)
                if communicates:
                    took = took._replace(total=took.total + communicates, exposed=communicates, elementwise_bytes=0.0)
            taken = ProgramSeconds(*np.add(taken, took).tolist())
        return taken

    def _of_tick(self, branches: Mapping[int, ProgramSeconds]) -> ProgramSeconds:
        """Seconds of the longest branch that a stage takes in a tick, on average over the ticks."""
        assert self._ticks is not None
        none = ProgramSeconds()
        taken = [max(branches.get(i, none) for i in row) for row in self._ticks]
        return ProgramSeconds(*np.mean(taken, axis=0).tolist())

    def _started_by(self, each: hlo.Instruction, inner: list[str]) -> list[hlo.Collective]:
        found = hlo.collective_of(each)
        if found is not None:
            return [found]
        if hlo.ends(each):
            return []
        return [collective for name in inner for collective in self.collectives(name)]

    def _collectives(self, name: str) -> list[hlo.Collective]:
        """The collectives in a fusion, without the parts of one that runs beside it."""
        if name.startswith("async_collective_fusion"):
            return []
        return [
            collective for each in self._listed[name] for collective in self._started_by(each, self._called_by(each))
        ]

    def _collective_s(self, each: hlo.Collective) -> float:
        """Seconds of the slowest group."""
        if each.kind == "collective-permute":
            shapes = {(2, 2 if self._hosts[a] == self._hosts[b] else 1) for a, b in each.groups if a != b}
        else:
            shapes = {(len(group), self._in_host(group)) for group in each.groups}
        kind, num_bytes = _KINDS[each.kind], each.num_bytes
        return max((float(self._cluster.collective_seconds(kind, num_bytes, *shape)) for shape in shapes), default=0.0)

    def _in_host(self, group: Sequence[int]) -> int:
        """Members in each host; 1 where hosts hold different numbers of them."""
        counts = np.unique([self._hosts[place] for place in group], return_counts=True)[1]
        return int(counts[0]) if len(set(counts.tolist())) == 1 else 1

    def _kernel(self, name: str, each: hlo.Instruction, inner: list[str]) -> ProgramSeconds:
        """An instruction that runs alone."""
        if each.operation in _FREE or each.operation.endswith("-done"):
            return ProgramSeconds()
        if each.operation == "custom-call" and any(f'"{target}"' in each.rest for target in _OF_VMEM):
            return ProgramSeconds()
        if each.operation == "fusion":
            [called] = inner
            listed, matrix_s = self._listed[called], self.matrix_s(called)
            num_bytes = sum(self._bytes_read(called, each) for each in listed if each.operation == "parameter")
            num_bytes += self._bytes_written(called, listed[-1])
        else:
            num_bytes, matrix_s = self._bytes(name, each), self._own_matrix_s(name, each)
        took = max(matrix_s, num_bytes / self._cluster.elementwise_bytes_per_second)
        products, elementwise_bytes = (took, 0.0) if matrix_s else (0.0, num_bytes)
        return ProgramSeconds(took + self._cluster.kernel_s, 0.0, products, elementwise_bytes, 1.0)

    def _matrix_s(self, name: str) -> float:
        """Seconds of the products in a computation, and in those that it calls."""
        return sum(
            self._own_matrix_s(name, each) + sum(map(self.matrix_s, self._called_by(each)))
            for each in self._listed[name]
        )

    def _own_matrix_s(self, name: str, each: hlo.Instruction) -> float:
        if each.operation == "custom-call" and (kernel := _KERNEL.search(each.rest)):
            share = _TRITON if "triton" in kernel[1] else 1.0
            return self._attention_flops(name, each, kernel[1]) / (self._cluster.attention_per_second * share)
        is_matmul = each.operation == "custom-call" and _MATMUL.search(each.rest)
        if each.operation not in ("dot", "convolution") and not is_matmul:
            return 0.0
        left, right = (hlo.arrays_in(self._by_name[name][operand].shapes)[0] for operand in hlo.operands_of(each)[:2])
        if each.operation == "convolution":
            flops = 2 * _products_of_convolution(left[1], right[1], hlo.arrays_in(each.shapes)[0][1], each.rest)
        else:
            found = _CONTRACTED.search(each.rest)
            contracted = [int(dim) for dim in re.findall(r"\d+", found[1])] if found else []
            flops = 2 * math.prod(hlo.arrays_in(each.shapes)[0][1]) * math.prod(left[1][dim] for dim in contracted)
        is_wide = {left[0], right[0]} <= {"f32", "f64"}
        share = self._float32_shares["highest" in each.rest] if is_wide else 1
        return flops / (self._cluster.products_per_second * share)

    def _attention_flops(self, name: str, each: hlo.Instruction, target: str) -> float:
        found = _KERNEL_NAME.search(each.rest)
        kernel = target if target.startswith("__cudnn$fmha") else found[1] if found else ""
        if splash := _SPLASH.match(each.name):
            kernel = splash[1]
        if kernel not in _PRODUCTS:
            raise _UnknownError
        arrays = [
            array for operand in hlo.operands_of(each) for array in hlo.arrays_in(self._by_name[name][operand].shapes)
        ]
        query, key = [dims for dtype, dims in arrays if dtype in ("bf16", "f16", "f32") and len(dims) > 2][:2]
        num_keys = min(key[-2], self._length or key[-2]) if splash else key[-3]
        share = 0.5 if "causal_attention" in each.rest else 1.0
        return share * 2 * _PRODUCTS[kernel] * math.prod(query) * num_keys

    def _bytes(self, name: str, each: hlo.Instruction) -> float:
        """Bytes that an instruction outside of fusions reads and writes."""
        if each.operation in _SLICES:
            return 2 * hlo.bytes_in(each.shapes)
        taken = [
            hlo.bytes_in(found.shapes) if (found := self._by_name[name].get(o)) else 0 for o in hlo.operands_of(each)
        ]
        if each.operation == "dynamic-update-slice":
            return 2 * taken[1]
        if each.operation == "scatter":
            return 3 * taken[-1]
        return sum(taken) + hlo.bytes_in(each.shapes)

    def _called_by(self, each: hlo.Instruction) -> list[str]:
        """The computations that an instruction calls, in its order."""
        if "=" not in each.rest:
            return []
        called = hlo.called_by(each.rest) & self._bodies.keys()
        return list(dict.fromkeys(name for name in hlo.names_in(each.rest) if name in called)) if called else []

    def _users(self, name: str) -> dict[str, list[tuple[hlo.Instruction, int]]]:
        """The instructions that take each value of a computation, and as which operand."""
        users: dict[str, list[tuple[hlo.Instruction, int]]] = {each.name: [] for each in self._listed[name]}
        for each in self._listed[name]:
            for place, operand in enumerate(hlo.operands_of(each)):
                users[operand].append((each, place))
        return users

    def _bytes_read(self, name: str, value: hlo.Instruction) -> float:
        """Bytes that a fusion reads of an argument, or of a view of it."""
        whole, total = hlo.bytes_in(value.shapes), 0.0
        for each, place in self.users(name)[value.name]:
            if each.operation in _SLICES and place == 0:
                total += hlo.bytes_in(each.shapes)
            elif each.operation in _VIEWS and (size := hlo.bytes_in(each.shapes)):
                total += whole * self._bytes_read(name, each) / size
            elif each.operation == "fusion":
                [called] = self._called_by(each)
                taken = (
                    e for e in self._listed[called] if e.operation == "parameter" and e.rest.startswith(f"{place})")
                )
                total += self._bytes_read(called, next(taken))
            elif each.operation not in ("dynamic-update-slice", "scatter") or place > 0:
                return whole
        return min(total, whole)

    def _bytes_written(self, name: str, root: hlo.Instruction) -> float:
        by_name = self._by_name[name]
        if root.operation == "tuple":
            return sum(self._bytes_written(name, by_name[operand]) for operand in hlo.operands_of(root))
        if root.operation == "bitcast":
            return self._bytes_written(name, by_name[hlo.operands_of(root)[0]])
        if root.operation == "dynamic-update-slice":
            return hlo.bytes_in(by_name[hlo.operands_of(root)[1]].shapes)
        if root.operation == "scatter":
            return 2 * hlo.bytes_in(by_name[hlo.operands_of(root)[-1]].shapes)
        if root.operation == "fusion":
            [called] = self._called_by(root)
            return self._bytes_written(called, self._listed[called][-1])
        return hlo.bytes_in(root.shapes)


def _products_of_convolution(taken: tuple[int, ...], kernel: tuple[int, ...], given: tuple[int, ...], rest: str) -> int:
    """How many numbers are multiplied, without zeros that only pad or spread the input."""
    labels = _LABELS.search(rest)
    if labels is None:
        raise _UnknownError
    in_labels, kernel_labels, out_labels = labels.groups()
    found = _WINDOW.search(rest)
    window = dict(each.split("=") for each in found[1].split()) if found else {}
    batch, features = given[out_labels.index("b")], given[out_labels.index("f")]
    total = batch * features * kernel[kernel_labels.index("i")]

    def of_dim(key: str, dim: int, default: str) -> str:
        values = window.get(key)
        return values.split("x")[dim] if values else default

    for label in filter(str.isdigit, kernel_labels):
        dim = int(label)
        size, out = kernel[kernel_labels.index(label)], given[out_labels.index(label)]
        stride, in_dilation, dilation = (int(of_dim(key, dim, "1")) for key in ("stride", "lhs_dilate", "rhs_dilate"))
        low = int(of_dim("pad", dim, "0_0").split("_")[0])
        at = np.arange(out)[:, None] * stride - low + np.arange(size) * dilation
        length = taken[in_labels.index(label)]
        total *= int(((at >= 0) & (at % in_dilation == 0) & (at // in_dilation < length)).sum())
    return total
