"""Lowers a step for any bucket."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError
from jvarlen._common.pytree import describe, have_same_containers, leaves_by_name
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.compile_options import CompileOptions, check_compiler_options
from jvarlen.compiling.program_store import environment_of
from jvarlen.compiling.recompiles import counting_in_thread
from jvarlen.compiling.report import CompileRow, row_of
from jvarlen.distributed.grad_buckets import with_grad_buckets
from jvarlen.distributed.layout import BucketBytes
from jvarlen.distributed.mesh import devices_of, replicate, with_auto_axes
from jvarlen.planning.buckets import AnyBucket

__all__ = ["CompiledBucket", "LoweredBucket", "Recipe", "make_recipe"]


_HOISTED_FROM_BYTES = 2**20  # what a step closes over in all, from which on its arrays become arguments of programs
_CONSTANT_BYTES = 2**12  # an array up to here stays a constant


class LoweredBucket(NamedTuple):
    """The program of a bucket before compilation.

    Attributes:
      bucket: its shape.
      program: takes the state, a batch, and `constants`; gives the next state and metrics, or metrics alone where the
        step keeps its state.
      constants: arrays that the step closes over, on the devices that it runs on.
      keeps_state: whether the step returns the very state that it takes.
      seconds: of tracing and lowering it.
    """

    bucket: AnyBucket
    program: jax.stages.Lowered
    constants: tuple[jax.Array, ...]
    keeps_state: bool
    seconds: float

    @property
    def metrics(self) -> Any:
        """Shapes and dtypes of what a step returns besides the state."""
        return self.program.out_info if self.keeps_state else self.program.out_info[1]


class CompiledBucket(NamedTuple):
    """The program of a bucket, and what it cost."""

    row: CompileRow
    executable: jax.stages.Compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What makes the program of any bucket.

    Attributes:
      step_fn: `step_fn(state, batch) -> (state, metrics)`, not jitted.
      state_spec: pytree of `jax.ShapeDtypeStruct`.
      shapes: of its batches, and where these lie.
      devices: those that a step runs on, those of other processes included.
      compiler_options: of XLA.
      donate: whether a step writes the next state over the one that it takes.
      grad_buckets: sizes of the buckets in which gradients are reduced; None: all together.
    """

    step_fn: Callable[[Any, Any], tuple[Any, Any]]
    state_spec: Any
    shapes: BatchShapes
    devices: list[jax.Device]
    compiler_options: Mapping[str, Any]
    donate: bool = True
    grad_buckets: BucketBytes | None = None
    _placed: dict[int, tuple[Any, jax.Array]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def mesh(self) -> Mesh | None:
        """Where a step runs; None: the default device."""
        return None if self.shapes.placement is None else self.shapes.placement.mesh

    @property
    def name(self) -> str:
        """The name of the step function."""
        return getattr(self.step_fn, "__name__", "step")

    @property
    def device(self) -> jax.Device:
        """The first of this process."""
        return next(device for device in self.devices if device.process_index == jax.process_index())

    @property
    def splits_a_cpu(self) -> bool:
        """Whether the step runs on several devices that are parts of this process's CPU."""
        own = [device for device in self.devices if device.process_index == jax.process_index()]
        return len(own) > 1 and self.device.platform == "cpu"

    @property
    def bytes_limit(self) -> int | None:
        """Bytes of memory of a device; None where it does not tell."""
        return (self.device.memory_stats() or {}).get("bytes_limit")

    @property
    def device_text(self) -> str:
        """Number and kind of the devices."""
        kinds = sorted({device.device_kind for device in self.devices})
        return f"{len(self.devices)} × {', '.join(kinds)}"

    @property
    def can_serialize_what_was_read(self) -> bool:
        """Whether a program that was not compiled here, but read from somewhere, can be turned into bytes again.

        XLA's CPU backend then leaves the code out, and only running it shows that.
        """
        return self.device.platform != "cpu"

    @property
    def environment(self) -> dict[str, Any]:
        """What must be the same where programs are compiled and where they are run, by name."""
        return environment_of(self.devices) | {"compiler options": dict(self.compiler_options)}

    def lower(self, bucket: AnyBucket) -> LoweredBucket:
        """Traces and lowers the step for a bucket.

        Settings of JAX that a `with` block makes are those of one thread: it is called in the user's.
        """
        keeps_state = False

        # A function of its own for each bucket: JAX keeps an executable as long as the function that was jitted lives.
        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            nonlocal keeps_state
            outputs = self.step_fn(state, batch)
            self._check_outputs(outputs)
            pairs = zip(jax.tree.leaves(state), jax.tree.leaves(outputs[0]), strict=True)
            keeps_state = all(given is returned for given, returned in pairs)
            return outputs

        start = time.perf_counter()
        with with_grad_buckets(self.grad_buckets):
            traced = self._jitted(step).trace(self.state_spec, self.shapes.spec(bucket))
        hoisted = self._hoisted(traced.jaxpr)
        constants = tuple(hoisted.values())
        if keeps_state or constants:
            again = self._jitted(_retraced(traced, tuple(hoisted), metrics_only=keeps_state), keeps_state=keeps_state)
            traced = again.trace(self.state_spec, self.shapes.spec(bucket), *([constants] if constants else []))
        return LoweredBucket(bucket, traced.lower(), constants, keeps_state, time.perf_counter() - start)

    def _jitted(self, step: Callable[..., Any], *, keeps_state: bool = False) -> Any:
        step.__name__ = step.__qualname__ = self.name
        shardings: Any = None
        if self.mesh is not None and not keeps_state:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state_spec), None
        return jax.jit(step, donate_argnums=0 if self.donate and not keeps_state else (), out_shardings=shardings)

    def _hoisted(self, closed: ClosedJaxpr) -> dict[int, jax.Array]:
        """Which constants become arguments, by their place, on the devices of the step."""
        sizes = {i: getattr(constant, "nbytes", 0) for i, constant in enumerate(closed.consts)}
        if sum(sizes.values()) < _HOISTED_FROM_BYTES:
            return {}
        return {i: self._place(closed.consts[i]) for i, size in sizes.items() if size > _CONSTANT_BYTES}

    def _place(self, constant: Any) -> jax.Array:
        """One copy for all buckets."""
        if id(constant) not in self._placed:
            if self.mesh is None:
                placed = jax.device_put(constant)
            elif isinstance(sharding := getattr(constant, "sharding", None), NamedSharding):
                placed = jax.device_put(constant, with_auto_axes(sharding))
            else:
                placed = replicate(constant, self.mesh)
            self._placed[id(constant)] = constant, placed
        return self._placed[id(constant)][1]

    def compile(self, lowered: LoweredBucket) -> CompiledBucket:
        """Compiles what `lower` gave, in whatever thread."""
        start = time.perf_counter()
        with counting_in_thread() as count:
            executable = lowered.program.compile(compiler_options=dict(self.compiler_options) or None)
        seconds = time.perf_counter() - start
        hit = count.num_cache_hits > 0
        return CompiledBucket(row_of(lowered.bucket, executable, lowered.seconds, seconds, hit), executable)

    def _check_outputs(self, outputs: Any) -> None:
        if not (isinstance(outputs, tuple) and len(outputs) == 2):
            raise UserError(f"{self.name} must return (state, metrics), not {type(outputs).__name__}")
        given, returned = (
            {name: describe(jax.typeof(leaf)) for name, leaf in leaves_by_name(state).items()}
            for state in (self.state_spec, outputs[0])
        )
        changed = [name for name in {**given, **returned} if given.get(name) != returned.get(name)]
        if changed or not have_same_containers(self.state_spec, outputs[0]):
            listed = "; ".join(f"{name or 'it'}: {given.get(name)} -> {returned.get(name)}" for name in changed[:5])
            raise UserError(
                f"{self.name} returns a state that differs from its input: {listed or 'its containers differ'}"
            )


def make_recipe(
    step_fn: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    shapes: BatchShapes,
    options: CompileOptions,
    *,
    donate: bool = True,
) -> Recipe:
    """Takes arguments of `compile_buckets`.

    Raises:
      ValueError: options that the installed jaxlib does not take; a step for one device, on several of which every one
        would compute the whole step.
    """
    num_shards = 1 if shapes.placement is None else shapes.placement.layout.data
    if num_shards > 1 and getattr(step_fn, "placement", shapes.placement) is None:
        raise UserError(
            f"the step was made for one device and is compiled for {num_shards} shards, each of which would compute "
            "the whole step: give make_train_step, or make_eval_step, the same layout"
        )
    mesh = None if shapes.placement is None else shapes.placement.mesh
    devices = devices_of(mesh)
    recipe = Recipe(
        step_fn=step_fn,
        state_spec=_spec_of_state(state, mesh),
        shapes=shapes,
        devices=devices,
        compiler_options=options.compiler_options(devices[0].platform, len(devices)),
        donate=donate,
        grad_buckets=options.grad_buckets,
    )
    known = check_compiler_options(recipe.compiler_options, recipe.device)
    return dataclasses.replace(recipe, compiler_options=known)


def _retraced(traced: jax.stages.Traced, hoisted: tuple[int, ...], *, metrics_only: bool) -> Callable[..., Any]:
    """A traced step as a function that also takes the constants at these places, and may leave the state out."""
    closed, structure = traced.jaxpr, jax.tree.structure(traced.out_info)

    def step(state: Any, batch: Any, constants: tuple[Any, ...] = ()) -> Any:
        consts = list(closed.consts)
        for place, constant in zip(hoisted, constants, strict=True):
            consts[place] = constant
        outputs = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*jax.tree.leaves((state, batch)))
        state, metrics = jax.tree.unflatten(structure, outputs)
        return metrics if metrics_only else (state, metrics)

    return step


def _spec_of_state(state: Any, mesh: Mesh | None) -> Any:
    """Shapes and dtypes of a state as a step takes it; what is not placed on a mesh is replicated over it."""

    def spec(leaf: Any, abstract: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding: Any = None if mesh is None else getattr(leaf, "sharding", None)
        if mesh is not None:
            is_replicated = not isinstance(sharding, NamedSharding)
            sharding = NamedSharding(mesh, PartitionSpec()) if is_replicated else with_auto_axes(sharding)
        return jax.ShapeDtypeStruct(abstract.shape, abstract.dtype, sharding=sharding)

    return jax.tree.map(spec, state, jax.eval_shape(lambda state: state, state))
