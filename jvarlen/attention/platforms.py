"""Chooses one of several functions by the platform that is compiled for; the others are not traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from jvarlen._common.types import PyTree
from jvarlen.attention.masks import varying_axes

__all__ = ["PLATFORMS", "Devices", "by_platform"]

PLATFORMS = ("cpu", "cuda", "tpu")

_R = TypeVar("_R")
_Functions: TypeAlias = tuple[tuple[str, Callable[..., list[Array]]], ...]


class Devices(NamedTuple):
    """The devices that a program is compiled for, which need not be here."""

    is_split: bool = False  # whether the compiler shares operations between them, as outside `shard_map`
    capability: float | None = None  # of NVIDIA's, such as 9.0; None where JAX does not tell it


def by_platform(*args: PyTree, default: Callable[..., _R], **functions: Callable[..., _R]) -> _R:
    """`default(*args)`, or `function(*args, devices=…)` of one of PLATFORMS, which gives arrays of the same types.

    A compiler cannot share kernels between devices. On a CPU, `default` serves unless operations are shared.

    `jax.lax.platform_dependent` traces all functions, and all are counted as operations and memory of a program: here
    `default` stands for all, and is differentiated. The functions take all arrays as arguments.
    """
    leaves, structure = jax.tree.flatten(args)
    jaxpr, shapes = jax.make_jaxpr(default, return_shape=True)(*args)

    def call_flat(function: Callable[..., _R], *leaves: Array, devices: Devices) -> list[Array]:
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves), devices=devices))

    flat = tuple((platform, functools.partial(call_flat, function)) for platform, function in functions.items())
    return jax.tree.unflatten(jax.tree.structure(shapes), _by_platform.bind(*leaves, jaxpr=jaxpr, functions=flat))


_by_platform = Primitive("by_platform")
_by_platform.multiple_results = True


def _run(*args: Array, jaxpr: ClosedJaxpr, functions: _Functions) -> list[Array]:
    del functions
    return jaxpr_as_fun(jaxpr)(*args)


def _lower(platform: str, context: Any, *values: Any, jaxpr: ClosedJaxpr, functions: _Functions) -> Sequence[Any]:
    """The program of the function of a platform."""
    axes, backend = context.module_context.axis_context, context.module_context.backend
    if hasattr(axes, "mesh"):  # inside `shard_map`
        mesh, others = None, set(axes.mesh.axis_names) - axes.manual_axes - set(axes.mesh.manual_axes)
        is_split = any(axes.mesh.shape[name] > 1 for name in others)
    else:
        meshes = (aval.sharding.mesh for aval in context.avals_in)
        mesh = next((mesh for mesh in meshes if not mesh.empty), _context_mesh())
        others = set(mesh.axis_names) if mesh.size == 1 else set()  # a context can name more devices than there are
        is_split = (axes.num_devices or 1) > 1
    devices = Devices(is_split, _capability(() if backend is None else backend.devices()))

    def run(*args: Array) -> list[Array]:
        if platform not in dict(functions) or (platform == "cpu" and not is_split):
            return _run(*args, jaxpr=jaxpr, functions=functions)
        function = functools.partial(dict(functions)[platform], devices=devices)
        # Kernels do not say which axes results vary over, where `shard_map` checks them. Beside an axis of the
        # compiler, even of one device, kernels for TPUs are rejected.
        if not is_split and (others or any(map(varying_axes, args))):
            in_specs = tuple(aval.sharding.spec for aval in context.avals_in)
            out_specs = [aval.sharding.spec for aval in context.avals_out]
            function = jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=others, check_vma=False
            )
        return function(*args)

    return mlir.lower_fun(run)(context, *values)


def _capability(devices: Sequence[jax.Device]) -> float | None:
    """That of the first device, where JAX tells it."""
    texts = [getattr(device, "compute_capability", None) for device in devices[:1]]
    return float(texts[0]) if texts and texts[0] is not None else None


def _context_mesh() -> jax.sharding.AbstractMesh:
    """The mesh of the context, or one of a single device of the same kind."""
    mesh = jax.sharding.get_abstract_mesh()
    one = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=mesh.abstract_device)
    return one if mesh.empty else mesh


def _batch(
    args: Sequence[Array], axes: Sequence[int | None], *, jaxpr: ClosedJaxpr, functions: _Functions
) -> tuple[list[Array], list[int]]:
    def batch(function: Callable[..., list[Array]], *args: Array, **options: Devices) -> list[Array]:
        return jax.vmap(functools.partial(function, **options), axes)(*args)

    others = {platform: functools.partial(batch, function) for platform, function in functions}
    results = by_platform(*args, default=functools.partial(batch, jaxpr_as_fun(jaxpr)), **others)
    return results, [0] * len(results)


def _differentiate(
    args: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, jaxpr: ClosedJaxpr, functions: _Functions
) -> tuple[list[Array], list[Array]]:
    del functions
    places = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def vary(*varied: Array) -> list[Array]:
        given = dict(zip(places, varied, strict=True))
        return jaxpr_as_fun(jaxpr)(*(given.get(i, arg) for i, arg in enumerate(args)))

    return jax.jvp(vary, [args[i] for i in places], [tangents[i] for i in places])


_by_platform.def_impl(_run)
_by_platform.def_abstract_eval(lambda *_, jaxpr, functions: list(jaxpr.out_avals))
batching.primitive_batchers[_by_platform] = _batch
ad.primitive_jvps[_by_platform] = _differentiate
mlir.register_lowering(_by_platform, mlir.lower_fun(_run))
for _platform in PLATFORMS:
    mlir.register_lowering(_by_platform, functools.partial(_lower, _platform), platform=_platform)
