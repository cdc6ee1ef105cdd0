"""The persistent compilation cache: programs are found again, users' settings stay."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jvarlen.compiling import program_store
from jvarlen.compiling.program_store import use_compilation_cache, without_compilation_cache

DIRECTORY = "jax_compilation_cache_dir"
ENABLED = "jax_enable_compilation_cache"
MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"
MIN_BYTES = "jax_persistent_cache_min_entry_size_bytes"


@pytest.fixture(autouse=True)
def _as_jax_comes(monkeypatch):
    """Settings of JAX that no one has touched, and after the test those from before."""
    before = {name: getattr(jax.config, name) for name in (DIRECTORY, ENABLED, MIN_SECONDS, MIN_BYTES)}
    monkeypatch.setattr(program_store, "_own_setting", None)
    for name, value in {DIRECTORY: None, ENABLED: True, MIN_SECONDS: 1.0, MIN_BYTES: 0}.items():
        jax.config.update(name, value)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def compile_small():
    """Compiles a program of its own, in far less than a second."""
    compile_small.calls += 1
    jax.jit(lambda x: x * compile_small.calls).lower(np.ones(compile_small.calls, np.float32)).compile()


compile_small.calls = 0


def programs(directory):
    return {path.name for path in directory.glob("*-cache")}


def test_without_a_directory_it_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_compilation_cache()
    compile_small()
    assert programs(tmp_path / "jvarlen" / "compiled")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_another_process_finds_what_was_compiled_after_the_switch(tmp_path):
    program = f"""
import jax, numpy as np, pathlib
from jvarlen.compiling.program_store import use_compilation_cache
compiled = lambda factor: jax.jit(lambda x: x * factor).lower(np.float32(0)).compile()
compiled(2)  # JAX looks for a cache here, and finds none
use_compilation_cache(pathlib.Path({str(tmp_path)!r}))
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
compiled(3)
print("/jax/compilation_cache/cache_hits" in events)
"""
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true"},
        ).stdout
        for _ in range(2)
    ]
    assert printed == ["False\n", "True\n"]


def test_what_is_compiled_without_the_cache_is_not_kept(tmp_path):
    use_compilation_cache(tmp_path / "cache")
    with without_compilation_cache():
        compile_small()
    assert not programs(tmp_path / "cache")
    compile_small()
    assert programs(tmp_path / "cache")


def test_a_users_directory_is_the_one_used(tmp_path):
    jax.config.update(DIRECTORY, str(tmp_path / "his"))
    use_compilation_cache()
    with pytest.warns(UserWarning, match="are cached in .*his by JAX's setting, not in .*ours") as caught:
        use_compilation_cache(tmp_path / "ours")
    assert caught[0].filename == __file__, "the line that called it"
    compile_small()
    assert len(programs(tmp_path / "his")) == 1
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(("name", "value"), [(MIN_SECONDS, 0.5), (MIN_BYTES, 1000)])
def test_a_users_limits_stay(tmp_path, name, value):
    jax.config.update(name, value)
    use_compilation_cache(tmp_path)
    expected = {MIN_SECONDS: 0.0, MIN_BYTES: -1} | {name: value}
    assert {name: getattr(jax.config, name) for name in expected} == expected


def test_a_cache_that_is_switched_off_stays_off(tmp_path):
    jax.config.update(ENABLED, False)
    use_compilation_cache(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    assert (jax.config.jax_compilation_cache_dir, getattr(jax.config, MIN_SECONDS)) == (None, 1.0)


def test_the_directory_is_made_for_this_user_alone(tmp_path):
    mask = os.umask(0)
    try:
        use_compilation_cache(tmp_path / "above" / "cache")
    finally:
        os.umask(mask)
    assert (tmp_path / "above" / "cache").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_is_said_and_done_without(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="compiled programs are not cached") as caught:
        use_compilation_cache(tmp_path / "file" / "cache")
    assert caught[0].filename == __file__
    assert jax.config.jax_compilation_cache_dir is None
