import itertools
import json
import os
import pathlib
import types

import jax
import pytest

from tests import forked
from tests.conftest import long
from tests.training.small import small_config, write_text
from transformer_flax.training import loop
from transformer_flax.training.compilation_cache import keep_compiled

COMPILE = """
import json, sys
import jax
from transformer_flax.training.compilation_cache import keep_compiled

jax.config.update("jax_compilation_cache_dir", sys.argv[2] or None)
place = keep_compiled(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
for size in (8, 9):
    jax.jit(lambda x: x @ x + 1)(jax.numpy.ones((size, size))).block_until_ready()
json.dump([str(place), len(list(place.glob("*-cache")))], sys.stdout)
"""


def compile_in(cache_dir, given: str = "") -> tuple[str, int]:
    """In a process of its own: the place of compiled programs, and how many there are."""
    result = forked.run("-c", COMPILE, cache_dir, given)
    assert result.returncode == 0, result.stderr
    assert "persistent compilation cache" not in result.stderr
    return tuple(json.loads(result.stdout))


def test_compiled_programs_are_kept_where_jax_was_told_to(tmp_path):
    given = str(tmp_path / "given")
    assert compile_in(tmp_path / "cache", given)[0] == given


def test_compiled_programs_are_kept_in_the_cache_and_those_that_were_cut_short_made_anew_once(tmp_path):
    place, programs = compile_in(tmp_path)
    assert place.startswith(str(tmp_path / "compiled"))
    sizes = {file: file.stat().st_size for file in pathlib.Path(place).glob("*-cache")}
    assert len(sizes) == programs >= 2
    for left, (file, size) in zip(itertools.cycle([0, 0.5]), sizes.items(), strict=False):
        os.truncate(file, int(left * size))
    assert compile_in(tmp_path) == (place, programs)
    assert {file: file.stat().st_size for file in sizes} == pytest.approx(sizes, rel=0.1)
    written = {file: file.stat().st_mtime_ns for file in sizes}
    assert compile_in(tmp_path) == (place, programs)  # found again
    assert {file: file.stat().st_mtime_ns for file in sizes} == written


def test_programs_of_cpus_with_other_instructions_are_kept_apart_and_those_of_several_processes_are_not_kept(
    tmp_path, monkeypatch
):
    cpuinfo = tmp_path / "cpuinfo"
    paths = types.SimpleNamespace(Path=lambda name: cpuinfo if name == "/proc/cpuinfo" else pathlib.Path(name))
    monkeypatch.setattr("transformer_flax.training.compilation_cache.pathlib", paths)

    def place(clock, instructions):
        cpuinfo.write_text(f"cpu MHz: {clock}\n{instructions}\nbugs:\n")
        jax.config.update("jax_compilation_cache_dir", None)
        return keep_compiled(str(tmp_path))

    names = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
    before = {name: jax.config.values[name] for name in names}
    try:
        x86, same = place(1_000, "flags: sse avx2"), place(2_000, "flags: sse avx2")
        others = {place(1_000, "flags: sse avx512"), place(1_000, "Features: fp asimd"), place(1_000, "Features: fp")}
        kept = [jax.config.values["jax_enable_compilation_cache"]]
        monkeypatch.setattr("transformer_flax.training.compilation_cache.share", lambda: (1, 2))
        place(1_000, "")
        kept.append(jax.config.values["jax_enable_compilation_cache"])
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert kept == [True, False]
    assert x86 == same
    assert len({x86, *others}) == 4


@pytest.mark.parametrize(("steps", "profiled"), [(4, "3 to 4"), long(3, "1 to 3")])
def test_a_profile_is_recorded_where_it_is_told(tmp_path, monkeypatch, capsys, steps, profiled):
    monkeypatch.setattr(loop, "PROFILED", slice(2, 4))  # not whole in three steps, so the last ones are profiled
    (tmp_path / "text").mkdir()
    text = str(write_text(tmp_path / "text"))
    config = small_config(data__path=text, data__cache_dir=str(tmp_path / "cache"), steps=steps, eval__every=0)
    loop.train(config, tmp_path / "run", profile=True)
    assert f"profile of steps {profiled}: {tmp_path / 'run/profile'}" in capsys.readouterr().out
    assert list((tmp_path / "run/profile").rglob("*.trace.json.gz"))
    loop.train(config, tmp_path / "run", profile=True)
    assert "nothing was profiled, as the run ended before" in capsys.readouterr().out
