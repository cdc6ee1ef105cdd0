"""Counted operations and collectives of models, against formulas and compiled programs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import Bucket
from jvarlen.estimates.model_costs import PerPass, count_costs
from jvarlen.models import DecoderConfig, init_params, layered, make_loss_fn
from jvarlen.parallel import LayeredModel, LayeredParams

WIDTH, KEYS, HIDDEN, VOCABULARY = 64, 32, 176, 257
MODEL = DecoderConfig(num_layers=4, width=WIDTH, num_heads=8, num_kv_heads=4)
SHORT, LONG = Bucket(2, 32), Bucket(1, 64)


@functools.cache
def counted():
    params = jax.eval_shape(lambda: init_params(MODEL, seed=0))
    return count_costs(layered(MODEL), (SHORT, LONG), params=params, tensor_sizes=(1, 2, 3, 4, 8, 16))


def flops_of(passes):
    return PerPass(*(each.flops + each.attention for each in passes))


def test_operations_are_those_of_the_products():
    costs, layer = counted(), flops_of(counted().layer)
    # Queries and the output, keys and values, three products of the MLP.
    of_position = 2 * WIDTH * (2 * WIDTH + 2 * KEYS + 3 * HIDDEN)
    attention = [2 * bucket.length * WIDTH for bucket in (SHORT, LONG)]  # half of the pairs
    assert layer.forward.tolist() == [bucket.padded_tokens * (of_position + each) for bucket, each in
                                      zip((SHORT, LONG), attention, strict=True)]  # fmt: skip
    assert (layer.backward >= 2 * layer.forward).all()
    assert (layer.backward <= 2.5 * layer.forward).all()
    assert (layer.full <= layer.forward).all()
    assert layer.selective.tolist() == [64 * 2 * 2 * WIDTH * HIDDEN] * 2  # two of the MLP
    assert costs.ends.forward.flops.tolist() == [2 * 64 * WIDTH * VOCABULARY] * 2
    assert costs.step_flops[0] == 4 * (layer.forward + layer.backward)[0] + 3 * costs.ends.forward.flops[0]
    assert costs.layer.forward.attention.tolist() == [64 * each for each in attention]
    assert costs.layer.forward.kernels.tolist() == [2 * 8] * 2  # seven products and attention


def test_long_rows_have_the_operations_of_all_their_pairs():
    """Whatever computes them: attention's loops turn as often as the data say."""
    config = DecoderConfig(num_layers=2, width=16, num_heads=2, compute_dtype="bfloat16")
    params = jax.eval_shape(lambda: init_params(config, seed=0))
    costs = count_costs(layered(config), [Bucket(1, 256), Bucket(1, 1024)], params=params, tensor_sizes=(1, 2))
    for of_pass, products in zip(flops_of(costs.layer), (2, 5, 0, 2), strict=True):
        of_position = of_pass / [256, 1024]
        assert of_position[1] - of_position[0] == products * (1024 - 256) * 16
    assert [each.flops for each in costs.layer_split] == pytest.approx([1, 1, 1, 1], abs=0.01)


def test_collectives_are_those_of_the_papers():
    """Two all-reduces a layer forward and two backward; one for what is computed again, as the last is not needed."""
    costs = counted()
    found = {axis: [[tuple(each[:2]) for each in of_pass] for of_pass in passes]
             for axis, passes in costs.layer_traffic.items()}  # fmt: skip
    assert found["tensor"] == [[("all_reduce", 2)], [("all_reduce", 2)], [], [("all_reduce", 1)]]
    both = [("all_gather", 2), ("reduce_scatter", 2)]
    assert found["sequence_parallel"][0] == both
    assert found["sequence_parallel"][2:] == [[("all_gather", 2)], [("all_gather", 2), ("reduce_scatter", 1)]]
    # Keys and values; backward also their gradients, by an all-to-all, which counts as one.
    assert found["context"] == [[("all_gather", 1)], [("all_gather", 2)], [], [("all_gather", 1)]]
    assert costs.layer_traffic["context"].forward[0].num_bytes == 2 * KEYS / WIDTH  # keys and values
    assert costs.x_bytes.tolist() == [64 * WIDTH * 4] * 2


def test_parameters_and_sizes_are_those_of_the_model():
    costs = counted()
    params = jax.eval_shape(lambda: init_params(MODEL, seed=0))
    of_layers, of_all = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params["layers"], params))
    assert 4 * sum(costs.layer_params) == of_layers
    assert sum(costs.ends_params) == of_all - of_layers
    assert costs.tensor_sizes == (1, 2, 4, 8)  # which divide heads of queries
    assert costs.by_positions
    assert [each.flops for each in costs.layer_split] == pytest.approx([1, 1, 1, 1], abs=0.01)


def test_devices_that_share_heads_gather_them():
    config = dataclasses.replace(MODEL, num_kv_heads=2)
    params = jax.eval_shape(lambda: init_params(config, seed=0))
    costs = count_costs(layered(config), (SHORT,), params=params, tensor_sizes=(1, 2, 3, 4, 8))
    assert (costs.tensor_sizes, costs.shared_heads) == ((1, 2, 4, 8), 2)
    one_of_each = 2 * 8 / WIDTH  # a head of keys and one of values
    assert costs.layer_traffic["shared_heads"] == (
        (("all_gather", 2, one_of_each),), (("reduce_scatter", 2, one_of_each),), (), (("all_gather", 2, one_of_each),)
    )  # fmt: skip
    assert costs.layer_traffic["tensor"] == counted().layer_traffic["tensor"]
    one = count_costs(layered(config), (SHORT,), params=params, tensor_sizes=(1, 2))
    assert "shared_heads" not in one.layer_traffic


def test_elementwise_bytes_are_those_of_a_program_for_an_h200():
    """68.4 GB, by the instructions of XLA's program of the benchmark's 255 × 256 in one microbatch."""
    config = DecoderConfig(num_layers=8, width=1024, num_heads=8, compute_dtype="bfloat16")
    params = jax.eval_shape(lambda: init_params(config, seed=0))
    costs = count_costs(layered(config), [Bucket(255, 256)], params=params)
    per_layer, ends = (sum(each.num_bytes[0] for each in part[:2]) for part in (costs.layer, costs.ends))
    assert 8 * per_layer + ends == pytest.approx(68.4e9, rel=0.05)


def test_longer_rows_are_extrapolated():
    params = jax.eval_shape(lambda: init_params(MODEL, seed=0))
    lengths = 511, 1023, 8191
    costs = count_costs(layered(MODEL), [Bucket(1, length) for length in lengths], params=params)
    per_position = flops_of(costs.layer).forward / lengths
    assert per_position[2] - per_position[1] == pytest.approx((per_position[1] - per_position[0]) * 14)
    assert costs.by_positions  # although two devices divide none of these


def test_a_users_model_with_a_loop_and_a_convolution():
    def layer(own, x, microbatch, axes):
        def turn(x, _):
            return jnp.tanh(x @ own["k"]), None

        return jax.lax.scan(turn, x, None, length=5)[0]

    def embed(ends, microbatch, axes):
        rows = microbatch.tokens[:, :, None].astype(jnp.float32)
        return jax.lax.conv_general_dilated(rows, ends["filter"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

    model = LayeredModel(embed, layer, lambda ends, x, microbatch, axes: (x.sum(), microbatch.weights.sum()))
    params = LayeredParams(
        {"filter": jax.ShapeDtypeStruct((3, 1, 16), np.float32)}, {"k": jax.ShapeDtypeStruct((2, 16, 16), np.float32)}
    )
    costs = count_costs(model, [SHORT], params=params, tensor_sizes=(1, 2))
    assert costs.layer.forward.flops.tolist() == [5 * 2 * 64 * 16 * 16]
    assert costs.ends.forward.flops.tolist() == [2 * 64 * 16 * 3]
    assert (costs.tensor_sizes, costs.by_positions) == ((1,), False)


def test_a_loss_function_has_no_layers_and_no_products_are_refused():
    params = jax.eval_shape(lambda: init_params(MODEL, seed=0))
    costs = count_costs(make_loss_fn(MODEL), [SHORT], params=params)
    whole = counted()
    assert costs.num_layers == 0
    assert flops_of(costs.ends).forward[0] == 4 * flops_of(whole.layer).forward[0] + whole.ends.forward.flops[0]
    with pytest.raises(ValueError, match="no products of matrices"):
        count_costs(lambda params, microbatch: (params.sum(), params.sum()), [SHORT], params=np.zeros(3, np.float32))
