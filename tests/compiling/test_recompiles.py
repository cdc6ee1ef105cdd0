"""The guard against recompiling: it sees everything, explains what JAX explains, and leaves nothing switched on."""

import contextlib
import logging
import re
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as compilation_cache_of_jax

from jvarlen import Bucket
from jvarlen.compiling import recompiles
from jvarlen.compiling.recompiles import Recompilation, RecompileError, counting_in_thread, dispatched, no_recompiles

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
LOGGERS = [
    logging.getLogger(f"jax._src.{name}")
    for name in ("interpreters.pxla", "interpreters.partial_eval", "compiler", "compilation_cache")
]


def compile_something():
    """A program that no one has compiled before."""
    compile_something.calls += 1
    return jax.jit(lambda x: x * compile_something.calls)(np.ones(compile_something.calls))


compile_something.calls = 0


def in_thread(work, name=None):
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


def setup_of_jax():
    """All that a guard touches."""
    return (
        [(logger.level, list(logger.handlers), list(logger.filters), logger.propagate) for logger in LOGGERS],
        jax.config.jax_explain_cache_misses,
    )


@pytest.fixture
def persistent_cache(tmp_path):
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache_of_jax.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache_of_jax.reset_cache()


def new_program(factor):
    """A jitted function that JAX has not seen, though the persistent cache may have a program that is the same."""
    return jax.jit(lambda x: jnp.sin(x) * factor)


def test_a_compilation_raises_where_it_happens():
    reached = []

    def guarded():
        with no_recompiles():
            compile_something()
            reached.append("the next line")

    with pytest.raises(RecompileError, match="lambda"):
        guarded()
    assert not reached


def test_jax_works_on_after_a_compilation_that_raised():
    double = jax.jit(lambda x: 2 * x)
    with pytest.raises(RecompileError), no_recompiles():
        double(np.ones(3))
    assert double(np.ones(3)).tolist() == [2, 2, 2]
    with no_recompiles() as count:
        double(np.ones(3))
    assert count.num_compilations == 0


def test_an_eager_operation_of_a_new_shape_raises():
    x = np.ones((3, 17, 5))
    with pytest.raises(RecompileError, match=r"'cumsum' was compiled .* for float32\[3,17,5\]:"), no_recompiles():
        jnp.cumsum(x, axis=1)


def test_a_swallowed_compilation_raises_at_the_end():
    with pytest.raises(RecompileError), no_recompiles(), contextlib.suppress(RecompileError):
        compile_something()


def test_a_compilation_in_another_thread_raises_at_the_end():
    errors = []

    def work():
        try:
            compile_something()
        except RecompileError as error:
            errors.append(error)

    with pytest.raises(RecompileError, match=r"; in thread data$"), no_recompiles():
        in_thread(work, "data")
    assert len(errors) == 1


def test_all_that_was_swallowed_is_told_at_the_end():
    def guarded():
        with no_recompiles():
            for length in range(231, 240):
                with contextlib.suppress(RecompileError):
                    jnp.cumsum(np.ones(length))

    with pytest.raises(RecompileError, match=r"float32\[231\].*Compiled after it: 8 more, of cumsum$"):
        guarded()


def test_compilations_are_counted_or_warned_of():
    with no_recompiles("count") as outer:
        with pytest.warns(UserWarning, match="lambda.*compiled inside no_rec") as told, no_recompiles("warn") as inner:
            compile_something()
        compile_something()
    assert told[0].filename == __file__
    assert inner.num_compilations >= 1
    assert outer.num_compilations >= inner.num_compilations + 1
    assert outer.num_compiled == outer.num_compilations
    assert set(outer.functions) >= {"<lambda>"}
    before = outer.num_compilations
    compile_something()
    assert outer.num_compilations == before


def test_an_error_inside_is_not_replaced():
    with pytest.raises(KeyError), no_recompiles():
        raise KeyError


def test_an_unknown_action_is_refused():
    with pytest.raises(ValueError, match="'ignore'"), no_recompiles("ignore"):
        pass


@pytest.mark.parametrize(
    ("weights", "x", "difference"),
    [
        (np.ones(3), np.ones((2, 5)), r"x: now f32\[2,5\], before f32\[2,4\]"),
        (np.ones(2), np.ones((2, 5)), r"state\['w'\]: now f32\[2\], before f32\[3\]; x: now f32\[2,5\], before .*"),
        (np.ones(3), 2.0, r"x: now f32\[\]\S*weak_type=True\}, before f32\[2,4\]\S*weak_type=False\}"),
        ([np.ones(3)], np.ones((2, 4)), r"\[0\]\[0\]\['w'\]: now .*list.*, before .*"),
    ],
)
def test_the_leaf_that_differs_is_told(weights, x, difference):
    @jax.jit
    def step(state, x):
        return jax.tree.map(lambda w: w + jax.jit(jnp.sin)(x).sum(), state)

    step({"w": np.ones(3)}, np.ones((2, 4)))
    with no_recompiles("count") as count:
        step({"w": weights}, x)
    (recompilation,) = count.recompilations
    assert recompilation.function == "step"
    assert re.fullmatch(difference, recompilation.difference)


def test_what_was_traced_as_a_part_does_not_explain_another_program_of_that_name():
    @jax.jit
    def cumprod(x):
        return x * 2

    with no_recompiles("count") as count:
        jax.jit(lambda x: cumprod(x) + 1)(np.ones(3))
        jnp.cumprod(np.ones((5, 19)))
    assert [(each.function, each.difference) for each in count.recompilations] == [
        ("<lambda>", "the function is new"),
        ("cumprod", ""),
    ]


def test_a_function_that_is_made_anew_each_time_is_told():
    with no_recompiles("count") as count:
        for _ in range(2):
            jax.jit(lambda x: x - 1)(np.ones(3))
    first, second = count.recompilations
    assert first.difference == "the function is new"
    assert second.difference == "the function is new, though another of that line was seen before"


def test_many_differences_are_told_in_part():
    total = jax.jit(lambda leaves: sum(leaf.sum() for leaf in leaves))
    total([np.ones(2)] * 9)
    said = r"for 9 × float32\[3\]: .*leaves\[5\]: now .*; and 3 more"
    with pytest.raises(RecompileError, match=said), no_recompiles():
        total([np.ones(3)] * 9)


def test_programs_lowered_before_they_are_compiled_are_told_only_where_it_is_sure_which():
    def same(x):
        return x

    def lower(length):
        return jax.jit(same).lower(jax.ShapeDtypeStruct((length,), np.float32))

    with no_recompiles("count") as count:
        lower(3).compile()
        lowered = [lower(4), lower(5)]
        lowered[0].compile()
        lower(6).compile()
    assert [recompilation.arguments for recompilation in count.recompilations] == ["float32[3]", "", "float32[6]"]


def test_the_bucket_dispatched_last_is_told(monkeypatch):
    monkeypatch.setattr(recompiles, "_last_bucket", None)
    with no_recompiles("count") as count:
        compile_something()
    assert {recompilation.bucket for recompilation in count.recompilations} == {None}
    dispatched(Bucket(2, 16))
    dispatched(Bucket(4, 8))
    with pytest.raises(RecompileError, match="; the bucket dispatched last was 4×8"), no_recompiles():
        compile_something()


def test_cache_hits_are_told_from_compilations(persistent_cache):
    x = np.ones(11)
    with no_recompiles("count") as cold:
        new_program(0.25)(x)
    with no_recompiles("count") as warm:
        new_program(0.25)(x)
    assert (cold.num_compilations, cold.num_cache_hits, cold.num_compiled) == (1, 0, 1)
    assert (warm.num_compilations, warm.num_cache_hits, warm.num_compiled) == (1, 1, 0)
    assert warm.recompilations[0].seconds > 0
    with pytest.raises(RecompileError, match="; the executable came from the persistent cache"), no_recompiles():
        new_program(0.25)(x)


def test_a_thread_counts_what_it_compiles_itself(persistent_cache):
    num_programs = 4
    for factor in range(num_programs):
        new_program(factor + 0.5)(np.ones(5))
    counts = {}
    together = threading.Barrier(2)

    def work(name, size):
        with counting_in_thread() as counts[name]:
            for factor in range(num_programs):
                together.wait(60)
                new_program(factor + 0.5)(np.ones(size))

    threads = [threading.Thread(target=work, args=args) for args in (("hits", 5), ("compiles", 6))]
    with no_recompiles("count") as of_all:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (counts["hits"].num_cache_hits, counts["hits"].num_compiled) == (num_programs, 0)
    assert (counts["compiles"].num_cache_hits, counts["compiles"].num_compiled) == (0, num_programs)
    assert (of_all.num_cache_hits, of_all.num_compiled) == (num_programs, num_programs)
    for size, count in ((5, counts["hits"]), (6, counts["compiles"])):
        assert {recompilation.arguments for recompilation in count.recompilations} == {f"float32[{size}]"}


def test_counting_in_a_thread_does_not_keep_other_guards_from_raising():
    with no_recompiles("count"), counting_in_thread() as count:
        with pytest.raises(RecompileError), no_recompiles():
            compile_something()
        compile_something()
    assert count.num_compilations >= 2


def test_a_cache_hit_of_one_thread_is_not_that_of_another():
    def compiled(name):
        jax.monitoring.record_event_duration_secs(COMPILE_EVENT, 0.5, fun_name=f"jit({name})")

    with no_recompiles("count") as count:
        jax.monitoring.record_event(CACHE_HIT_EVENT)
        in_thread(lambda: compiled("other"), "other")
        compiled("mine")
        compiled("next")
    with no_recompiles("count") as later:
        compiled("later")
    assert [(each.function, each.cache_hit) for each in count.recompilations + later.recompilations] == [
        ("other", False),
        ("mine", True),
        ("next", False),
        ("later", False),
    ]
    assert count.recompilations[0] == Recompilation(
        "other", "", "", count.recompilations[1].bucket, False, "other", 0.5
    )


@pytest.mark.parametrize(
    ("logger", "message", "args"),
    [
        (LOGGERS[0], "Compiling", ()),
        (LOGGERS[0], "Compiling %s", ("jit(f)",)),
        (LOGGERS[0], "Compiling %s for %s", ("jit(f)", 3)),
        (LOGGERS[0], "Compiling %s for %s", (None, [3])),
        (LOGGERS[1], "TRACING CACHE MISS", ()),
        (LOGGERS[1], "TRACING CACHE MISS at %s", ()),
        (LOGGERS[1], "TRACING CACHE MISS at a line:\n  never seen function:", ()),
        (LOGGERS[1], "TRACING CACHE MISS at a line:\n  for f\n", ()),
        (LOGGERS[1], "TRACING CACHE MISS at a line:\n of f", ()),
    ],
)
def test_a_log_that_is_not_understood_tells_nothing_and_breaks_nothing(logger, message, args, caplog):
    with no_recompiles("count") as count:
        logger.log(logging.DEBUG if logger is LOGGERS[0] else logging.WARNING, message, *args)
        jax.monitoring.record_event_duration_secs(COMPILE_EVENT, 0.5, fun_name="jit(f)")
    (recompilation,) = count.recompilations
    assert (recompilation.function, recompilation.arguments, recompilation.difference) == ("f", "", "")
    assert not caplog.records


def test_an_idle_guard_leaves_jax_as_it_was():
    before = setup_of_jax()
    second_entered, first_left = threading.Event(), threading.Event()

    def work():
        with no_recompiles("count"):
            second_entered.set()
            first_left.wait(60)

    second = threading.Thread(target=work)
    with contextlib.suppress(RecompileError), no_recompiles():
        second.start()
        second_entered.wait(60)
        compile_something()
    assert all(now != then for now, then in zip(setup_of_jax(), before, strict=True))
    first_left.set()
    second.join()
    assert setup_of_jax() == before
    assert recompiles._guards == []
    with counting_in_thread():
        assert setup_of_jax() == before


def test_a_guard_prints_nothing(persistent_cache, caplog, capfd):
    with no_recompiles("count") as count:
        for _ in range(2):
            new_program(0.125)(np.ones(13))
    assert (count.num_compiled, count.num_cache_hits) == (1, 1)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("jax_explain_cache_misses", ["TRACING CACHE MISS", "PERSISTENT COMPILATION CACHE MISS", "Writing"]),
        ("jax_log_compiles", ["Compiling jit(<lambda>) with global shapes"]),
    ],
)
def test_what_was_to_be_printed_still_is(persistent_cache, caplog, setting, said):
    jax.config.update(setting, True)
    try:
        with no_recompiles("count"):
            compile_something()
        assert getattr(jax.config, setting)
    finally:
        jax.config.update(setting, False)
    messages = [record.getMessage() for record in caplog.records]
    assert all(any(message.startswith(start) for message in messages) for start in said)


def test_warm_functions_are_neither_traced_nor_compiled_again():
    traced = []

    @jax.jit
    def step(x):
        traced.append(x)
        return x + 1

    x = jnp.ones(3)
    step(x)
    with counting_in_thread() as count:
        for _ in range(2):
            with no_recompiles():
                step(x)
            step(x)
    assert len(traced) == 1
    assert count.num_compilations == 0


def test_a_warning_that_is_an_error_raises_where_it_happens():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="compiled inside"), no_recompiles("warn"):
            compile_something()
