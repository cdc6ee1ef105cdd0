"""A function by the platform that is compiled for, of which the others are not even traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jvarlen.attention.seen import varying_axes

__all__ = ["PLATFORMS", "by_platform"]

PLATFORMS = ("cpu", "cuda", "tpu")


def by_platform(*args: Any, default: Callable[..., Any], **functions: Callable[..., Any]) -> Any:
    """`default(*args)`, or `function(*args, is_split=…)` of one of PLATFORMS, which gives arrays of the same types.

    `is_split` says whether the compiler shares operations between devices, as it does outside `shard_map`. It cannot
    share kernels. On a CPU, `default` serves unless it does.

    `jax.lax.platform_dependent` traces all functions, and all are counted as operations and memory of a program: here
    `default` stands for all. It is also what is differentiated. The functions take all arrays as arguments.
    """
    leaves, structure = jax.tree.flatten(args)
    jaxpr, shapes = jax.make_jaxpr(default, return_shape=True)(*args)

    def flat(function: Callable[..., Any], *leaves: Any, is_split: bool) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves), is_split=is_split))

    of_leaves = tuple((platform, functools.partial(flat, function)) for platform, function in functions.items())
    return jax.tree.unflatten(jax.tree.structure(shapes), _by_platform.bind(*leaves, jaxpr=jaxpr, functions=of_leaves))


_by_platform = Primitive("by_platform")
_by_platform.multiple_results = True


def _run(*args: Any, jaxpr: Any, functions: Any) -> Any:
    del functions
    return jaxpr_as_fun(jaxpr)(*args)


def _lowered_for(platform: str, context: Any, *args: Any, jaxpr: Any, functions: Any) -> Any:
    """The program of the function of a platform."""
    devices = context.module_context.axis_context
    if hasattr(devices, "mesh"):  # inside `shard_map`
        mesh, others = None, set(devices.mesh.axis_names) - devices.manual_axes - set(devices.mesh.manual_axes)
        is_split = any(devices.mesh.shape[name] > 1 for name in others)
    else:
        meshes = (aval.sharding.mesh for aval in context.avals_in)
        mesh = next((mesh for mesh in meshes if not mesh.empty), _context_mesh())
        others = set(mesh.axis_names) if mesh.size == 1 else set()  # a context can name more devices than there are
        is_split = (devices.num_devices or 1) > 1

    def run(*args: Any) -> Any:
        if platform not in dict(functions) or (platform == "cpu" and not is_split):
            return _run(*args, jaxpr=jaxpr, functions=functions)
        function = functools.partial(dict(functions)[platform], is_split=is_split)
        # Kernels do not tell which axes results vary over, where `shard_map` checks them; those for TPUs are refused
        # beside an axis of the compiler, even of one device, and those of cuDNN unless JAX tells which device it is.
        if not is_split and (others or any(map(varying_axes, args))):
            in_specs = tuple(aval.sharding.spec for aval in context.avals_in)
            out_specs = [aval.sharding.spec for aval in context.avals_out]
            options = {"mesh": mesh, "axis_names": others, "check_vma": False}
            function = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, **options)
        return function(*args)

    return mlir.lower_fun(run)(context, *args)


def _context_mesh() -> jax.sharding.AbstractMesh:
    """That of the context, or one of a single device of the same kind."""
    mesh = jax.sharding.get_abstract_mesh()
    one = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=mesh.abstract_device)
    return one if mesh.empty else mesh


def _batched(args: Sequence[Any], axes: Sequence[Any], *, jaxpr: Any, functions: Any) -> tuple[list[Any], list[int]]:
    def batched(function: Any, *args: Any, **options: Any) -> Any:
        return jax.vmap(functools.partial(function, **options), axes)(*args)

    others = {platform: functools.partial(batched, function) for platform, function in functions}
    results = by_platform(*args, default=functools.partial(batched, jaxpr_as_fun(jaxpr)), **others)
    return results, [0] * len(results)


def _differentiated(args: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, functions: Any) -> Any:
    del functions
    places = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_varied(*varied: Any) -> Any:
        given = dict(zip(places, varied, strict=True))
        return jaxpr_as_fun(jaxpr)(*(given.get(i, arg) for i, arg in enumerate(args)))

    return jax.jvp(of_varied, [args[i] for i in places], [tangents[i] for i in places])


_by_platform.def_impl(_run)
_by_platform.def_abstract_eval(lambda *_, jaxpr, functions: list(jaxpr.out_avals))
batching.primitive_batchers[_by_platform] = _batched
ad.primitive_jvps[_by_platform] = _differentiated
mlir.register_lowering(_by_platform, mlir.lower_fun(_run))
for _platform in PLATFORMS:
    mlir.register_lowering(_by_platform, functools.partial(_lowered_for, _platform), platform=_platform)
