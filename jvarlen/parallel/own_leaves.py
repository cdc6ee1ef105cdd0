"""Optimizers that see the model's parameters unstacked, where a layout stacks the layers.

Arrays stay stacked. The update is traced for the model's own leaves. What it does to all layers alike, which is nearly
everything, runs once on the stacked arrays, so that each stage updates its own layers. What differs between layers, or
mixes them, such as a global norm, takes each layer's value out of the stack.

The numbers are right whatever JAX does. That layers are found to be alike, without which programs grow with their
number, relies on this about traced functions, and `test_what_all_layers_do_alike_runs_once` fails by the name of what
no longer holds:

- Two equations are the same operation if their primitives have one name and their parameters one text (`_text_of`).
  Parameters that hold arrays are never the same.
- Calls are `jit`, `closed_call`, `custom_jvp_call` and `custom_vjp_call`, and their functions are in the parameters
  `jaxpr` or `call_jaxpr`, so that they can be replaced by their equations (`_inline`).
- A `cond` whose branches hold no `shard_map` is a `select_n` of the outputs of all branches.
- Arrays of an optimizer's state have paths that end in those of their parameters (`places_in`).

Letters: L layers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.jaxprs import primitives_in
from jvarlen._common.types import Array, Grads, KeyPath, Params, PyTree, Shapes
from jvarlen.parallel.layers import LayeredParams, OwnLeaf, OwnLeavesState, is_own_leaf, map_own
from jvarlen.parallel.zero import MIN_SHARDED
from jvarlen.training.step import with_extra_args
from jvarlen.training.train_state import MasterWeightsOptimizer, Optimizer
from jvarlen.training.trainable import Trainable, select_trained, where_trained

__all__ = ["Place", "on_own_leaves", "own_leaves_of", "places_in"]


class Place(NamedTuple):
    """The place of an array of the model or its optimizer among the arrays of the layout."""

    array: int  # which of them
    layer: int | None = None
    axis: int = 0  # of the layers
    param: int | None = None  # the place of the parameter whose shape it has, or ends in


def own_leaves_of(params: Params, stack: Callable[[Params], LayeredParams], trainable: Trainable = None) -> PyTree:
    """A tree of `OwnLeaf`; raises ValueError if `stack` does more than regroup and stack parameters."""
    leaves, structure = jax.tree.flatten(params)
    numbered = jax.tree.unflatten(structure, range(len(leaves)))
    trained = {*jax.tree.leaves(where_trained(select_trained(params, trainable), numbered))}
    # Which arrays become which is seen by stacking their numbers, in arrays of as many dimensions.
    numbers = [np.full((1,) * np.ndim(leaf), number, np.int32) for number, leaf in enumerate(leaves)]
    with jax.ensure_compile_time_eval():  # numbers while a caller is traced as well
        stacked = stack(jax.tree.unflatten(structure, numbers))
    found: dict[int, OwnLeaf] = {}
    num_found = 0
    of_shapes = jax.tree.leaves(jax.eval_shape(stack, params))
    for place, (of_numbers, there) in enumerate(zip(jax.tree.leaves(stacked), of_shapes, strict=True)):
        of_layers = np.asarray(of_numbers).ravel().tolist()
        for layer, number in enumerate(of_layers):
            num_found += 1
            shape = np.shape(leaves[number])
            if there.shape == shape and len(of_layers) == 1:
                found[number] = OwnLeaf(place, None, number in trained)
            elif there.shape == (len(of_layers), *shape):
                found[number] = OwnLeaf(place, layer, number in trained)
    if not len(found) == num_found == len(leaves):
        paths = [path for path, _ in jax.tree.leaves_with_path(params)]
        missing = [jax.tree_util.keystr(path) for number, path in enumerate(paths) if number not in found]
        raise UserError(
            "layouts that shard states take parameters that are stacked once, and the model's stack does not have each "
            f"of its {len(leaves)} arrays once, whole or as one of the layers: {list_first(missing) or num_found}"
        )
    return jax.tree.unflatten(structure, [found[number] for number in range(len(leaves))])


def on_own_leaves(
    optimizer: Optimizer, own: PyTree = None, *, mesh: Mesh | None = None
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of the arrays of a layout that updates the model's parameters as `optimizer` does."""
    # `own` is the result of `own_leaves_of`; None: take it from the state. `mesh` is that of the step.
    inner = with_extra_args(optimizer)

    def init(params: Params) -> PyTree:
        form = _Form(own, params, mesh)
        (inner_state,) = form.run(lambda params: (inner.init(params),), (form.shapes, form.in_own_order(params)))
        return OwnLeavesState(own, inner_state)

    @functools.wraps(inner.update)  # whose signature names the extra arguments that it takes
    def update(
        grads: Grads, state: OwnLeavesState, params: Params = None, **extra_args: Any
    ) -> tuple[Params, OwnLeavesState]:
        own, inner_state = state
        form = _Form(own, params, mesh)
        shapes = jax.eval_shape(inner.init, form.shapes)
        given = (form.shapes, form.in_own_order(grads)), (shapes, inner_state), (form.shapes, form.in_own_order(params))
        updates, inner_state = form.run(functools.partial(inner.update, **extra_args), *given)
        return form.in_layout_order(updates), OwnLeavesState(own, inner_state)

    if isinstance(inner, MasterWeightsOptimizer):
        return MasterWeightsOptimizer(init, update)
    return optax.GradientTransformationExtraArgs(init, update)


def places_in(shapes: Shapes, params: dict[KeyPath, tuple[OwnLeaf, Array]], num_layers: int) -> list[Place]:
    """The places of arrays of the model's optimizer, whose paths end in those of parameters."""
    # The layers of an array are in one stack if all layers have it, and none otherwise.
    found: list[tuple[OwnLeaf, int, bool, Hashable]] = []
    layers: dict[Hashable, list[int | None]] = {}
    for path, leaf in jax.tree.leaves_with_path(shapes):
        begin = next((i for i in range(len(path) + 1) if path[i:] in params), len(path))
        at, param = params.get(path[begin:], (OwnLeaf(-1, None), None))
        num_leading = -1 if param is None else leaf.ndim - len(param.shape)  # such as the history of L-BFGS
        is_like = num_leading >= 0 and leaf.shape[num_leading:] == param.shape
        found.append((at, num_leading if is_like else 0, is_like, (path[:begin], at.place, leaf.shape, leaf.dtype)))
        layers.setdefault(found[-1][-1], []).append(at.layer)
    places: list[Place] = []
    array_of: dict[Hashable, int] = {}
    for number, (at, axis, is_like, stack) in enumerate(found):
        is_stacked = at.layer is not None and len(layers[stack]) == num_layers
        array = array_of.setdefault(stack if is_stacked else number, len(array_of))
        places.append(Place(array, at.layer if is_stacked else None, axis, at.place if is_like else None))
    return places


class _Form:
    """How trees of the model, trained parameters and optimizer states, map to the arrays of a layout."""

    def __init__(self, own: PyTree, params: Params, mesh: Mesh | None):
        arrays, structure = jax.tree.flatten(params)
        found = sorted({at.place for at in jax.tree.leaves(own, is_leaf=is_own_leaf) if at.is_trained})
        own = map_own(lambda at: dataclasses.replace(at, place=found.index(at.place)) if at.is_trained else None, own)

        def shape_of(at: OwnLeaf) -> jax.ShapeDtypeStruct:
            array = arrays[at.place]
            return jax.ShapeDtypeStruct(array.shape if at.layer is None else array.shape[1:], array.dtype)

        self.mesh = mesh
        self.structure: jax.tree_util.PyTreeDef = structure
        self.shapes = map_own(shape_of, own)
        at = jax.tree.leaves(own, is_leaf=is_own_leaf)
        paths = jax.tree.leaves_with_path(self.shapes)
        self.params = {path: (at, shape) for (path, shape), at in zip(paths, at, strict=True)}
        places = [at.place for at in at if at.layer is not None]
        self.num_layers = max((len(arrays[place]) for place in places), default=1)
        # Arrays with trained and untrained layers, which are kept apart.
        self.partial = {place for place in places if places.count(place) < self.num_layers}

    def gather(self, array: Array) -> Array:
        """A small array, whole on all devices."""
        if self.mesh is None:
            return array
        return lax.with_sharding_constraint(array, NamedSharding(self.mesh, PartitionSpec()))

    @property
    def _own_order(self) -> list[tuple[int, int | None]]:
        """The places of parameters in the order of the first of their own leaves, and the layer of those apart."""
        found = [at for at, _ in self.params.values()]
        return list(dict.fromkeys((at.place, at.layer if at.place in self.partial else None) for at in found))

    def in_own_order(self, params: Params) -> list[Array]:
        """The arrays of parameters, or of what is like them, in the order of their own leaves."""
        arrays = jax.tree.leaves(params)
        return [arrays[place] if layer is None else arrays[place][layer] for place, layer in self._own_order]

    def in_layout_order(self, updates: Params) -> PyTree:
        """The inverse of `in_own_order`, with −0 for layers that are not trained, which changes no number."""
        arrays = dict(zip(self._own_order, jax.tree.leaves(updates), strict=True))

        def array_of(place: int) -> Array:
            if place not in self.partial:
                return arrays[place, None]
            like = next(array for (of, _), array in arrays.items() if of == place)
            nothing = jnp.full_like(like, -0.0)
            return jnp.stack([arrays.get((place, layer), nothing) for layer in range(self.num_layers)])

        return jax.tree.unflatten(self.structure, map(array_of, range(self.structure.num_leaves)))

    def run(self, function: Callable[..., tuple[PyTree, ...]], *given: tuple[Shapes, PyTree]) -> list[Array]:
        """Runs a function of trees of the model on trees of the layout; given are shapes and trees."""
        arrays: list[Array] = []
        places: list[Place] = []
        for shapes, tree in given:
            here = places_in(shapes, self.params, self.num_layers)
            places += [place._replace(array=place.array + len(arrays)) for place in here]
            arrays += jax.tree.leaves(tree)
        structure = jax.tree.structure([shapes for shapes, _ in given])

        def of_leaves(*leaves: Array) -> tuple[PyTree, ...]:
            return function(*jax.tree.unflatten(structure, leaves))

        traced, returned = _trace(of_leaves, [_own_shape(arrays[place.array], place) for place in places])
        outputs = iter(_run_by_layers(traced, arrays, places, self.gather))
        trees = []
        for shapes in returned:
            here = places_in(shapes, self.params, self.num_layers)
            packed = _pack([next(outputs) for _ in here], here)
            first = {place.array: number for number, place in reversed([*enumerate(here)])}
            leaves = [packed[place.array] if first[place.array] == i else () for i, place in enumerate(here)]
            trees.append(jax.tree.unflatten(jax.tree.structure(shapes), leaves))
        return trees


def _own_shape(array: Array, place: Place) -> jax.ShapeDtypeStruct:
    shape = array.shape if place.layer is None else np.delete(array.shape, place.axis)
    return jax.ShapeDtypeStruct(tuple(shape), array.dtype)


def _trace(function: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct]) -> tuple[ClosedJaxpr, Shapes]:
    """A function without inner ones, so that each layer has its operations; and its results."""
    traced, returned = jax.make_jaxpr(function, return_shape=True)(*shapes)
    return jax.make_jaxpr(lambda *args: _inline(traced.jaxpr, traced.consts, args))(*shapes), returned


def _inline(jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Var | Literal) -> Array:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        name, params = equation.primitive.name, equation.params
        inner: Any = params.get("jaxpr", params.get("call_jaxpr"))
        if name == "cond" and not any("shard_map" in primitives_in(branch.jaxpr) for branch in params["branches"]):
            which, *given = given
            branches = [_inline(branch.jaxpr, branch.consts, given) for branch in params["branches"]]
            made = [lax.select_n(which, *cases) for cases in zip(*branches, strict=True)]
        elif name in ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call"):
            made = _inline(inner.jaxpr, inner.consts, given)
        else:
            call, variables = _function_of(equation, jaxpr)
            made = call(*(values[variable] for variable in variables))
        values.update(zip(equation.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _function_of(equation: JaxprEqn, jaxpr: Jaxpr) -> tuple[Callable[..., list[Array]], list[Var]]:
    """An operation of a traced function, as a function of its variables, and these."""
    variables = list(dict.fromkeys(atom for atom in equation.invars if not isinstance(atom, Literal)))
    parts = {"constvars": [], "invars": variables, "outvars": equation.outvars, "effects": equation.effects}
    return jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(eqns=[equation], **parts), ())), variables


class _Value(NamedTuple):
    """A value of a traced function: that of one layer, which all layers have alike, or one by itself."""

    key: int  # of the array of all layers together, or of the value
    layer: int | None = None


class _Output(NamedTuple):
    value: _Value
    array: Array  # with a leading axis L where it is that of all layers
    whole: PyTree  # the same, gathered once where it is small, as for a norm of all layers

    @property
    def alone(self) -> Array:
        return self.array if self.value.layer is None else self.whole[self.value.layer]


def _run_by_layers(
    traced: ClosedJaxpr, arrays: list[Array], places: list[Place], gather: Callable[[Array], Array]
) -> list[_Output]:
    """The outputs of a function of the model's leaves; operations that all layers share run once for all."""
    equations = traced.jaxpr.eqns
    keys: dict[Hashable, int] = {}  # of what makes a value
    arrays_of: dict[int, Array] = {}  # by key

    def key_of(*what: Hashable) -> int:
        return keys.setdefault(what, len(keys))

    def value_of(atom: Var | Literal) -> _Value:
        if isinstance(atom, Literal):
            return _Value(key_of(*_literal(atom)))
        return values[atom]

    given: dict[Var, _Value] = {}
    for variable, const in zip(traced.jaxpr.constvars, traced.consts, strict=True):
        given[variable] = _Value(key_of("constant", variable))
        arrays_of[given[variable].key] = jnp.array(const) if isinstance(const, np.ndarray) else const
    for variable, place in zip(traced.jaxpr.invars, places, strict=True):
        given[variable] = _Value(key_of("given", place.array), place.layer)
        array = arrays[place.array]
        arrays_of[given[variable].key] = array if place.layer is None else jnp.moveaxis(array, place.axis, 0)

    texts = [_text_of(equation, number) for number, equation in enumerate(equations)]
    every_layer = {place.layer for place in places} - {None}
    num_uses = _count_uses(traced.jaxpr, texts, places)
    alone: set[int] = set()  # what only some layers do
    while True:
        values, operations = dict(given), []
        layers_of: dict[int, set[int | None]] = {}
        for equation, text in zip(equations, texts, strict=True):
            operands = [value_of(atom) for atom in equation.invars]
            layers = {operand.layer for operand in operands} - {None}
            layer = next(iter(layers)) if len(layers) == 1 else None
            key = key_of("layers", text, *((operand.key, operand.layer is None) for operand in operands))
            # A value that fewer operations take than there are layers, such as a part of a norm, is of no use to all.
            is_partial = any(
                operand.layer is None and not isinstance(atom, Literal) and num_uses[atom] < len(every_layer)
                for atom, operand in zip(equation.invars, operands, strict=True)
            )
            if layer is None or is_partial or key in alone:
                layer, key = None, key_of("alone", text, *operands)
            else:
                layers_of.setdefault(key, set()).add(layer)
            operations.append(_Value(key, layer))
            values |= {out: _Value(key_of("output", key, i), layer) for i, out in enumerate(equation.outvars)}
        incomplete = {key for key, layers in layers_of.items() if layers != every_layer}
        if not incomplete:
            break
        alone |= incomplete

    def output_of(atom: Var | Literal) -> _Output:
        value = value_of(atom)
        if isinstance(atom, Literal):
            return _Output(value, jnp.array(atom.val), None)
        array = arrays_of[value.key]
        if value.layer is None or math.prod(array.shape[1:]) >= MIN_SHARDED:
            return _Output(value, array, array)
        if value.key not in gathered:
            gathered[value.key] = gather(array)
        return _Output(value, array, gathered[value.key])

    done: set[int] = set()
    gathered: dict[int, Array] = {}
    for equation, (key, layer) in zip(equations, operations, strict=True):
        if key in done:
            continue
        done.add(key)
        call, variables = _function_of(equation, traced.jaxpr)
        taken = [output_of(variable) for variable in variables]
        if layer is None:
            made = call(*(operand.alone for operand in taken))
        else:
            axes = [None if operand.value.layer is None else 0 for operand in taken]
            made = jax.vmap(call, axes)(*(operand.array for operand in taken))
        arrays_of |= {key_of("output", key, i): array for i, array in enumerate(made)}
    return [output_of(atom) for atom in traced.jaxpr.outvars]


def _literal(literal: Literal) -> tuple[Hashable, ...]:
    """A key of a literal, the same for equal ones."""
    return "literal", literal.aval, np.asarray(literal.val).tobytes()


def _count_uses(jaxpr: Jaxpr, texts: list[str], places: list[Place]) -> dict[Var, int]:
    """How many operations take each variable, or one that differs from it by the layer alone."""
    numbers: dict[Hashable, int] = {}
    kinds: dict[Var, int] = {variable: -1 - i for i, variable in enumerate(jaxpr.constvars)}
    for variable, place in zip(jaxpr.invars, places, strict=True):
        kinds[variable] = numbers.setdefault(("given", place.array), len(numbers))
    uses: collections.Counter[int] = collections.Counter()
    for equation, text in zip(jaxpr.eqns, texts, strict=True):
        operands = [_literal(atom) if isinstance(atom, Literal) else kinds[atom] for atom in equation.invars]
        uses.update({operand for operand in operands if isinstance(operand, int)})
        for i, out in enumerate(equation.outvars):
            kinds[out] = numbers.setdefault((text, *operands, i), len(numbers))
    return {variable: uses[kind] for variable, kind in kinds.items()}


def _text_of(equation: JaxprEqn, number: int) -> str:
    """The text of an operation, the same for equal ones."""
    text = f"{equation.primitive.name} {equation.params}"
    has_arrays = any(
        isinstance(value, np.ndarray | jax.Array) or (isinstance(value, ClosedJaxpr) and value.consts)
        for value in jax.tree.leaves(equation.params)
    )
    return f"{text} {number}" if has_arrays else text


def _pack(outputs: Sequence[_Output], places: Sequence[Place]) -> list[Array]:
    """The arrays of the layout, from those of the model's leaves."""
    members: dict[int, list[tuple[Place, _Output]]] = {}
    for place, output in zip(places, outputs, strict=True):
        members.setdefault(place.array, []).append((place, output))
    packed = []
    for _, of_array in sorted(members.items()):
        of_array.sort(key=lambda member: member[0].layer or 0)
        (place, first), values = of_array[0], [output.value for _, output in of_array]
        if place.layer is None:
            packed.append(first.alone)
        elif values == [_Value(first.value.key, layer) for layer in range(len(values))]:
            packed.append(jnp.moveaxis(first.array, 0, place.axis))
        else:
            packed.append(jnp.stack([output.alone for _, output in of_array], place.axis))
    return packed
