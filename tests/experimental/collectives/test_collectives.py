"""Collectives give what NumPy gives, and send what `wire` counts: it is counted again in the compiled program."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jvarlen import UserError
from jvarlen.experimental.collectives import all_gather, all_reduce, broadcast, gather, reduce, reduce_scatter, scatter
from jvarlen.experimental.collectives.wire import ALGORITHMS, wire_bytes

NUM_DEVICES = [1, 2, 5, 8]
SHAPES = [(), (1,), (7,), (2, 3, 5), (16,)]
if not jax.__version__.startswith("0.11."):  # its compiler crashes at arrays without elements in `shard_map`
    SHAPES.append((0, 3))
INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = [np.dtype(name) for name in ("float16", "float32", "float64", "complex64")] + [jnp.dtype("bfloat16")]
AXIS = PartitionSpec("data")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def on_devices(fn, n, **kwargs):
    """Runs `fn` on n devices; the leading axis of every argument and result are the devices."""
    mesh = Mesh(np.array(jax.devices()[:n]), ("data",), axis_types=(AxisType.Auto,))

    def on_device(tree):
        return jax.tree.map(lambda x: x[None], fn(jax.tree.map(lambda x: x[0], tree)))

    return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(AXIS,), out_specs=AXIS, **kwargs))


def random(n, shape, dtype, seed=0):
    rng = np.random.default_rng([seed, n])
    if dtype.kind in "iu":  # sums wrap around
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, (n, *shape), dtype, endpoint=True)
    values = rng.standard_normal((n, *shape)) + (1j * rng.standard_normal((n, *shape)) if dtype.kind == "c" else 0)
    return values.astype(dtype)


def chunks_of(flat, n):
    size = math.ceil(flat.size / n)
    return np.concatenate([flat, np.zeros(size * n - flat.size, flat.dtype)]).reshape(n, size)


def summed(x):
    """The exact sum of small floats; integers wrap around."""
    if x.dtype.kind in "iu":
        return x.sum(axis=0, dtype=x.dtype)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64).sum(axis=0)


def only_at(root, value, n):
    return np.stack([value if i == root else np.zeros_like(value) for i in range(n)])


def results_of(x, root):
    """Every collective by every algorithm on this device."""
    found = {("scatter", "star"): scatter(x, "data", root), ("gather", "star"): gather(x, "data", root)}
    for algorithm in ALGORITHMS["broadcast"]:
        found["broadcast", algorithm] = broadcast(x, "data", root, algorithm=algorithm)
        found["reduce", algorithm] = reduce(x, "data", root, algorithm=algorithm)
    for algorithm in ALGORITHMS["all_gather"]:
        found["all_gather", algorithm] = all_gather(x, "data", algorithm=algorithm)
        found["reduce_scatter", algorithm] = reduce_scatter(x, "data", algorithm=algorithm)
    for algorithm in ALGORITHMS["all_reduce"]:
        found["all_reduce", algorithm] = all_reduce(x, "data", algorithm)
    return found


def expected_of(x, root):
    n, total = len(x), summed(x)
    return {
        "broadcast": np.stack([x[root]] * n),
        "reduce": only_at(root, total, n),
        "scatter": chunks_of(x[root].reshape(-1), n),
        "gather": only_at(root, x, n),
        "all_gather": np.stack([x] * n),
        "reduce_scatter": chunks_of(total.reshape(-1), n),
        "all_reduce": np.stack([total] * n),
    }


def assert_collectives(found, x, root):
    assert set(found) == {(kind, each) for kind, algorithms in ALGORITHMS.items() for each in algorithms}
    expected = expected_of(x, root)
    for (kind, algorithm), value in found.items():
        value, what = np.asarray(value), f"{kind} by {algorithm}, {x.dtype}{list(x.shape)}"
        assert value.dtype == x.dtype, what
        assert value.shape == expected[kind].shape, what
        if x.dtype.kind in "iub" or "reduce" not in kind:
            assert value.tobytes() == expected[kind].tobytes(), what
        else:
            wide = value.astype(expected[kind].dtype)
            bound = len(x) * float(jnp.finfo(x.dtype).eps) * np.abs(x).astype(np.float64).sum(axis=0).max(initial=0)
            assert np.abs(wide - expected[kind]).max(initial=0) <= bound, what
        if kind == "all_reduce":
            assert len({row.tobytes() for row in value}) == 1, what


@pytest.mark.parametrize("n", NUM_DEVICES)
def test_every_collective_gives_what_numpy_gives_for_any_shape(n):
    xs = [random(n, shape, np.dtype("int32"), seed) for seed, shape in enumerate(SHAPES)]
    xs.append(random(n, (2, 5), np.dtype("float32")))
    root = n // 2
    found = on_devices(lambda xs: [results_of(x, root) for x in xs], n)(xs)
    for x, each in zip(xs, found, strict=True):
        assert_collectives(each, x, root)


def test_every_device_can_be_the_root():
    x = random(5, (7,), np.dtype("int16"))

    def from_everywhere(x):
        return [{key: value for key, value in results_of(x, root).items() if "all" not in key[0]} for root in range(5)]

    for root, found in enumerate(on_devices(from_everywhere, 5)(x)):
        expected = expected_of(x, root)
        for (kind, _), value in found.items():
            np.testing.assert_array_equal(value, expected[kind])


def test_only_the_devices_along_the_axis_communicate():
    mesh = jax.make_mesh((2, 3), ("other", "data"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])
    both = PartitionSpec(("other", "data"))
    x = random(6, (7,), np.dtype("int32"))

    def on_device(x):
        return jax.tree.map(lambda value: value[None], results_of(x[0], 1))

    found = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=both, out_specs=both))(x)
    for group in (slice(3), slice(3, 6)):
        assert_collectives(jax.tree.map(lambda value, group=group: value[group], found), x[group], 1)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
def test_every_collective_gives_what_numpy_gives_for_any_dtype(dtype):
    x = random(3, (7,), dtype)
    assert_collectives(on_devices(lambda x: results_of(x, 2), 3)(x), x, 2)


def test_booleans_are_sent_and_not_summed():
    x = np.array([[True, False, True], [False, False, True]])
    senders = [broadcast, scatter, gather, all_gather, functools.partial(all_gather, algorithm="ring")]
    found = on_devices(lambda x: [send(x, "data") for send in senders], 2)(x)
    expected = expected_of(x.astype(np.int8), 0)
    for kind, value in zip(["broadcast", "scatter", "gather", "all_gather", "all_gather"], found, strict=True):
        assert value.dtype == bool
        np.testing.assert_array_equal(value, expected[kind].astype(bool))
    for total in (reduce, reduce_scatter, all_reduce):
        with pytest.raises(UserError, match=rf"{total.__name__} sums numbers, not booleans \(shape \(3,\)\)"):
            jax.eval_shape(on_devices(lambda x, total=total: total(x, "data"), 2), x)


def test_infinities_and_nan_stay_on_their_elements():
    x = np.array([[1, np.inf, 2, 3], [1, 1, np.nan, 3], [1, 2, 3, 4]], np.float32)
    found = on_devices(lambda x: [all_reduce(x, "data", each) for each in ALGORITHMS["all_reduce"]], 3)(x)
    for value in found:
        np.testing.assert_array_equal(value, [[3, np.inf, np.nan, 10]] * 3)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_the_gradient_of_every_all_reduce_is_that_of_psum(n):
    x, weights = random(n, (7,), np.dtype("float64")), random(n, (7,), np.dtype("float64"), seed=1)

    def gradients(given):
        x, weights = given

        def loss(x, algorithm):  # differs between devices
            return jnp.sum(weights * jnp.sin(all_reduce(jnp.cos(x), "data", algorithm)))

        return {algorithm: jax.grad(loss)(x, algorithm) for algorithm in ALGORITHMS["all_reduce"]}

    # dL/dx_i = −sin(x_i) · Σ_j w_j cos(Σ cos x): every device's loss depends on every x.
    expected = -np.sin(x) * (weights * np.cos(np.cos(x).sum(axis=0))).sum(axis=0)
    for algorithm, grad in on_devices(gradients, n)((x, weights)).items():
        np.testing.assert_allclose(grad, expected, rtol=1e-12, atol=1e-14, err_msg=algorithm)


def test_unchecked_results_leave_the_map_as_one_array():
    x = random(3, (7,), np.dtype("float32"))
    mesh = Mesh(np.array(jax.devices()[:3]), ("data",), axis_types=(AxisType.Auto,))

    @jax.jit
    def loss_and_grad(x):
        def loss(x, algorithm):
            total = jax.shard_map(
                lambda x: all_reduce(x[0], "data", algorithm),
                mesh=mesh,
                in_specs=AXIS,
                out_specs=PartitionSpec(),
                check_vma=False,
            )(x)
            return jnp.sum(total**2)

        return {each: jax.value_and_grad(loss)(x, each) for each in ALGORITHMS["all_reduce"]}

    for loss, grad in loss_and_grad(x).values():
        np.testing.assert_allclose(loss, (x.sum(axis=0) ** 2).sum(), rtol=1e-5)
        np.testing.assert_allclose(grad, np.stack([2 * x.sum(axis=0)] * 3), rtol=1e-5)


def permutes_of(program):
    """Of every collective-permute of a compiled program: elements, itemsize, and pairs of source and target."""
    found = []
    for line in program.as_text().splitlines():
        if match := re.search(r"= \(?([a-z]+)(\d+)\[([\d,]*)\]\S* collective-permute(?:-start)?\(", line):
            elements = math.prod(int(size) for size in match[3].split(",") if size)
            (pairs,) = re.findall(r"source_target_pairs=\{(.*?)\}(?:,|$)(?!\{)", line)
            pairs = [tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", pairs)]
            found.append((elements, int(match[2]) // 8, pairs))
    return found


SENT = [("all_reduce", "ring"), ("all_reduce", "tree"), ("all_reduce", "star"), ("broadcast", "tree")]
SENT += [("broadcast", "star"), ("reduce", "tree"), ("reduce", "star"), ("scatter", "star"), ("gather", "star")]
SENT += [("all_gather", "ring"), ("reduce_scatter", "ring")]


@pytest.mark.parametrize("n", [2, 3, 7, 8])
@pytest.mark.parametrize(("kind", "algorithm"), SENT)
def test_the_compiled_program_sends_what_was_counted(kind, algorithm, n):
    collective = {
        fn.__name__: fn for fn in (broadcast, reduce, scatter, gather, all_gather, reduce_scatter, all_reduce)
    }
    kwargs = {} if kind in ("scatter", "gather") else {"algorithm": algorithm}
    size = 13  # odd, and more than the devices
    program = on_devices(lambda x: collective[kind](x, "data", **kwargs), n).lower(np.zeros((n, size), np.float32))
    permutes = permutes_of(program.compile())
    whole = size * n if kind in ("gather", "all_gather") else size
    counted = wire_bytes(kind, 4 * whole, n, algorithm, itemsize=4)
    sent, received = np.zeros(n, int), np.zeros(n, int)
    for elements, itemsize, pairs in permutes:
        for source, target in pairs:
            sent[source] += elements * itemsize
            received[target] += elements * itemsize
    assert (tuple(sent), tuple(received)) == (counted.sent, counted.received)
    assert len(permutes) == counted.rounds
    rounds = {"ring": n - 1, "star": n - 1, "tree": math.ceil(math.log2(n))}[algorithm]
    assert len(permutes) == rounds * (2 if kind == "all_reduce" else 1)
    if algorithm == "ring" and kind != "all_gather":
        assert {elements for elements, _, _ in permutes} == {math.ceil(size / n)}


def test_bad_input_is_named():
    def trace(fn):
        jax.eval_shape(on_devices(fn, 2), np.zeros((2, 3)))

    with pytest.raises(UserError, match=r"algorithm \('gossip'\) of all_reduce must be one of 'xla', 'ring'"):
        trace(lambda x: all_reduce(x, "data", "gossip"))
    for collective in (broadcast, reduce, all_gather, reduce_scatter):
        with pytest.raises(UserError, match=rf"algorithm \('rs_ag'\) of {collective.__name__} must be one of"):
            trace(lambda x, collective=collective: collective(x, "data", algorithm="rs_ag"))
    for collective in (broadcast, reduce, scatter, gather):
        for root in (2, -1):
            with pytest.raises(UserError, match=rf"root must be a device of axis 'data', 0 to 1, not {root}"):
                trace(lambda x, collective=collective, root=root: collective(x, "data", root))
