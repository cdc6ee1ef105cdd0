"""Keywords that a function does not have: one line with the nearest, and with all that it has."""

import inspect

import pytest

import jvarlen

PLAN = jvarlen.make_plan([3, 1], [(2, 3)])


@pytest.mark.parametrize(
    ("call", "name", "nearest"),
    [
        (lambda package: package.make_plan([3], max_token=8), "max_token", "max_tokens"),
        (lambda package: package.make_plan([3], [(1, 3)], overlon="drop"), "overlon", "overlong"),
        (lambda package: package.make_plan([3], [(1, 3)], shuffle=True), "shuffle", None),
        (lambda package: package.make_plan([3], [(1, 3)], drop_last=True), "drop_last", None),
        (lambda package: package.make_buckets([3], 8, max_shape=1), "max_shape", "max_shapes"),
        (lambda package: package.stream_batches([3], max_token=8), "max_token", "max_tokens"),
        (lambda package: package.Budget(max_token=8), "max_token", "max_tokens"),
        (lambda package: package.Order("length", longest_frist=True), "longest_frist", "longest_first"),
        (lambda package: package.load(PLAN, [[1], [2]], drop_last=True), "drop_last", None),
        (lambda package: package.pack_samples([3], 8, methods="wrapped"), "methods", "method"),
    ],
)
def test_an_unknown_keyword_is_named_with_the_nearest_and_all_others(package, call, name, nearest):
    with pytest.raises(TypeError) as caught:
        call(package)
    message, _, listed = str(caught.value).partition("; its keywords are ")
    assert message.split(" (")[0].endswith(f"has no keyword {name}")
    assert ("(" in message) == (nearest is not None)
    assert nearest is None or (nearest in message and nearest in listed.split(", "))
    assert len(set(listed.split(", "))) == len(listed.split(", "))
    assert "\n" not in str(caught.value)


def test_functions_tell_their_keywords(package):
    untold = {"check_lengths"}  # it has one argument
    for name in package.__all__:
        function = getattr(package, name)
        if inspect.isfunction(function) and name not in untold:
            with pytest.raises(TypeError, match=rf"^{name} has no keyword no_keyword; its keywords are "):
                function(no_keyword=1)


def test_buckets_that_are_given_leave_none_to_choose(package):
    with pytest.raises(ValueError, match=r"max_shapes.* buckets"):
        package.make_plan([3], [(1, 3)], max_shapes=2)
