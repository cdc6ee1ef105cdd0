"""Pacing: the shares of the samples that a curriculum admits, and plans that follow them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jvarlen

from . import assert_same_plan, find, in_both
from .inputs import Table, few, for_plan, moderate, pacings, seeds, steps_of, text_of

SHAPES = {
    "linear_pacing": lambda x, initial, degree: initial + (1 - initial) * x,
    "competence_pacing": lambda x, initial, degree: min(
        1.0, (initial**degree + (1 - initial**degree) * x) ** (1 / degree)
    ),
}


def made(package, name, num_steps, initial, degree):
    options = {"degree": degree} if name == "competence_pacing" else {}
    return find(package, name)(num_steps, initial=initial, **options)


@pytest.mark.parametrize("name", SHAPES)
@few
@given(
    num_steps=st.integers(1, 1000),
    initial=st.floats(1e-3, 1.0),
    degree=st.floats(0.5, 8.0),
    steps=st.lists(st.integers(0, 1200), min_size=1, max_size=20),
)
def test_pacing_follows_its_formula(package, name, num_steps, initial, degree, steps):
    """For single steps and arrays, in float64."""
    pacing = made(package, name, num_steps, initial, degree)
    expected = [SHAPES[name](min(step / num_steps, 1.0), initial, degree) for step in steps]
    np.testing.assert_allclose(pacing(np.array(steps)), expected, rtol=1e-12)
    assert pacing(np.array(steps)).dtype == np.float64
    assert float(pacing(steps[0])) == pytest.approx(expected[0], rel=1e-12)


@pytest.mark.parametrize("name", SHAPES)
@few
@given(
    num_steps=st.integers(1, 300),
    initial=st.floats(1e-6, 1.0),
    degree=st.floats(0.3, 9.0),
)
def test_no_pacing_falls_and_all_end_at_one(package, name, num_steps, initial, degree):
    """Within [0, 1] to the last bit, and exactly 1 from the last step on."""
    shares = made(package, name, num_steps, initial, degree)(np.arange(num_steps + 50))
    assert shares.min() >= 0
    assert shares.max() == 1
    assert (shares[num_steps:] == 1).all()
    assert (np.diff(shares) >= -1e-15).all()
    assert shares[0] == pytest.approx(initial, rel=1e-9)


@pytest.mark.parametrize(
    ("names", "options", "named"),
    [
        (tuple(SHAPES), {"num_steps": 0}, "num_steps"),
        (tuple(SHAPES), {"initial": 0.0}, "initial"),
        (tuple(SHAPES), {"initial": float("nan")}, "initial"),
        (("competence_pacing",), {"degree": 0}, "degree"),
    ],
    ids=text_of,
)
def test_bad_pacings_are_refused_by_name(package, names, options, named):
    """At least one step, an initial share in (0, 1], a degree above 0."""
    for name in names:
        valid = {"num_steps": 10, "initial": 0.5}
        find(package, name)(**valid)
        with pytest.raises(ValueError, match=named):
            find(package, name)(**(valid | options))


# Plans


@st.composite
def paced_arguments(draw):
    """Draw arguments of a paced plan without overlong samples."""
    given_lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=60))
    return {
        "lengths": given_lengths,
        "buckets": [(draw(st.integers(1, 3)), edge) for edge in sorted({draw(st.integers(1, 20)), 20})],
        "num_microbatches": draw(st.integers(1, 3)),
        "order": draw(st.sampled_from(["length", "length_descending"])),
        "seed": draw(seeds),
        "epoch": draw(st.integers(0, 3)),
        "pacing": draw(pacings),
    }


@moderate
@given(arguments=paced_arguments())
def test_both_pace_alike(arguments):
    """The draw, sample by sample."""
    assert_same_plan(*in_both(lambda package: package.make_plan(**for_plan(package, arguments))))


def test_every_admitted_sample_is_as_likely_to_come_first():
    """Over many seeds the first arrival is uniform among those admitted, and never another."""
    first = [
        int(
            jvarlen.make_plan(np.arange(1, 21), [(1, 20)], order="length", pacing=Table((0.25,)), seed=seed).sample_ids[
                0
            ]
        )
        for seed in range(1000)
    ]
    counts = np.bincount(first, minlength=20)
    assert counts[5:].sum() == 0
    # Each of the five within five standard deviations of 200.
    assert (abs(counts[:5] - 200) < 5 * (1000 * 0.2 * 0.8) ** 0.5).all()


def test_the_pacing_goes_on_through_the_epochs(package):
    """It is asked for global steps: those of epoch 2 follow those of two epochs before it."""
    asked = []

    def pacing(steps):
        assert isinstance(steps, np.ndarray)
        assert steps.dtype == np.int64
        asked.append(steps.tolist())
        return np.ones(len(steps))

    plan = package.make_plan([1, 2, 3, 4, 5], [(2, 5)], order="length", pacing=pacing, epoch=2)
    assert plan.num_steps == 3
    assert asked[0] == [6, 7, 8]


def test_pacing_by_difficulty_and_against_it(package):
    """The easiest come first, or with the descending order the hardest."""
    lengths = [5] * 8
    difficulty = [3, 1, 2, 0, 7, 5, 6, 4]
    options = {"difficulty": difficulty, "pacing": Table((0.25, 0.5, 1.0, 1.0)), "seed": 3}
    for order, easy in (("length", {0, 1, 2, 3}), ("length_descending", {4, 5, 6, 7})):
        plan = package.make_plan(lengths, [(2, 5)], order=order, **options)
        hardness = [[difficulty[i] for i in ids] for _, ids in steps_of(plan)]
        assert {*hardness[0], *hardness[1]} <= easy
        assert sorted(hardness[0]) == (sorted(easy)[:2] if order == "length" else sorted(easy)[2:])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"order": "shuffle"}, "order"),
        ({"block_size": 2}, "block_size"),
        ({"shuffle_steps": True}, "shuffle_steps"),
        ({"new_shape_every": 3}, r"new_shape_every.*\b3\b"),
        ({"pacing": Table((0.5, 1.5))}, r"1\.5"),
        ({"pacing": Table((0.5, -0.5))}, r"-0\.5"),
        ({"pacing": Table((0.5, float("nan")))}, "nan"),
        ({"pacing": lambda steps: np.ones(len(steps) + 1)}, "pacing"),
        ({"pacing": lambda step: float(step) / 10}, "pacing.* all steps"),
        ({"pacing": lambda step: min(1.0, step / 10)}, "pacing.* all steps"),
    ],
    ids=text_of,
)
def test_pacing_that_does_not_go_is_refused(package, arguments, named):
    """Orders by length only, nothing shuffled besides, shares from 0 to 1 of an array of steps."""
    valid = {"lengths": [3, 5, 8], "buckets": [(1, 8)], "pacing": Table((0.5, 1.0))}
    with pytest.raises(ValueError, match=named):
        package.make_plan(**for_plan(package, valid | arguments))
