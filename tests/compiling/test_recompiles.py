"""The guard against recompiling: it sees everything, in whatever thread, and tells what it was."""

import contextlib
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as compilation_cache_of_jax

from jvarlen import Bucket
from jvarlen.compiling.recompiles import RecompileError, counting_in_thread, no_recompiles, note_dispatch


def compile_something():
    """A program that no one has compiled before."""
    compile_something.calls += 1
    return jax.jit(lambda x: x * compile_something.calls)(np.ones(compile_something.calls))


compile_something.calls = 0


def in_thread(work, name=None):
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


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
    with pytest.raises(RecompileError, match="'cumsum' was compiled inside no_recompiles"), no_recompiles():
        jnp.cumsum(x, axis=1)


def test_a_compilation_in_another_thread_raises_at_the_end():
    errors = []

    def work():
        try:
            compile_something()
        except RecompileError as error:
            errors.append(error)

    with pytest.raises(RecompileError, match=r"; in thread data\."), no_recompiles():
        in_thread(work, "data")
    assert len(errors) == 1


def test_errors_that_were_caught_are_raised_at_the_end():
    def guarded():
        with no_recompiles():
            for length in range(231, 240):
                with contextlib.suppress(RecompileError):
                    jnp.cumsum(np.ones(length))

    with pytest.raises(RecompileError, match=r"Compiled after it: 8 more, of cumsum\. JAX logs why"):
        guarded()


def test_compilations_are_counted_or_warned_of():
    with no_recompiles("count") as outer:
        with pytest.warns(UserWarning, match="lambda.*compiled inside no_rec"), no_recompiles("warn") as inner:
            compile_something()
        compile_something()
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


def test_the_bucket_that_was_dispatched_last_is_named():
    with no_recompiles("count") as count:
        compile_something()
        note_dispatch(Bucket(2, 16))
        note_dispatch(Bucket(4, 8))
        with pytest.raises(RecompileError) as inner, no_recompiles():
            compile_something()
    assert {recompilation.bucket for recompilation in count.recompilations} == {None, "4×8"}
    assert "dispatched" not in str(inner.value)

    def guarded():
        with no_recompiles():
            note_dispatch(Bucket(4, 8))
            compile_something()

    with pytest.raises(RecompileError, match="; the bucket dispatched last was 4×8"):
        guarded()


def test_cache_hits_are_counted_apart_from_compilations(persistent_cache):
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


def test_a_warning_that_is_an_error_raises_where_it_happens():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="compiled inside"), no_recompiles("warn"):
            compile_something()
