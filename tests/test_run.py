"""A trained run as one object, and what is told to those who name one that cannot be had."""

import concurrent.futures
import dataclasses
import gc
import json
import math
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import transformer_flax
from tests.conftest import ROOT
from tests.training.small import small_config
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.settings import Sampling
from transformer_flax.errors import UserError
from transformer_flax.files import read_json_lines
from transformer_flax.model.registry import init_params
from transformer_flax.run import Run, restore
from transformer_flax.training import trained_model
from transformer_flax.training.checkpoint_files import load_params
from transformer_flax.training.checkpoints import Checkpoints
from transformer_flax.training.config_checks import model_config
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.step import TrainState

LAST, BEFORE = 200, 150  # checkpoints of the finished run


@pytest.fixture(scope="module")
def run(finished):
    return restore(finished)


@pytest.fixture(scope="module")
def sources(run):
    return run.split("test")[0]


def lines(file: pathlib.Path) -> list[str]:
    return file.read_text().removesuffix("\n").split("\n")


def assert_same(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_the_package_gives_run_and_restore_and_loads_jax_for_nothing_else():
    script = "import sys, transformer_flax, transformer_flax.translate; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
    assert transformer_flax.restore is restore
    assert transformer_flax.Run is Run
    assert transformer_flax.UserError is UserError
    assert {"Run", "Sampling", "UserError", "__version__", "restore"} <= set(dir(transformer_flax))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        transformer_flax.nonsense  # noqa: B018


# What a run does


@pytest.mark.parametrize("split", ["test", "valid"])
def test_a_run_is_measured_as_it_was_at_its_end(finished, run, split):
    sources, references = run.split(split)
    done = []
    report = run.evaluate(sources, references, progress=done.append)
    name = f"{LAST}.test.txt" if split == "test" else f"{LAST}.txt"
    assert report.translations == lines(finished / "translations" / name)
    (measured,) = (line for line in read_json_lines(finished / "metrics.jsonl") if f"{split}/bleu" in line)
    assert report.bleu == pytest.approx(measured[f"{split}/bleu"])
    assert report.exact_match == measured[f"{split}/exact_match"]
    if split == "test":  # in the other is a pair that training cuts earlier than scoring does
        assert report.perplexity == pytest.approx(measured[f"{split}/perplexity"], rel=1e-3)
    assert 0 < report.exact_match < 1 < report.bleu < 100  # not alike for being 0
    assert report.params_from == run.params_from == f"the mean of the parameters at steps {BEFORE}, {LAST}"
    assert done == sorted(done)
    assert done[-1] == len(sources)
    assert report.sentences_per_second > 0
    assert report.decode == run.config.decode.to_dict()
    assert report.translations[0] not in repr(report)  # which a notebook shows


def test_a_report_counts_the_programs_that_were_compiled_for_it(run):
    sources, references = run.split("test")
    compiled = [run.evaluate(sources[:2], references[:2], alpha=0.111).compilations for _ in range(2)]
    again = run.evaluate(iter(sources[:2]), np.array(references[:2]), alpha=0.111)  # any lines, read once
    assert again.compilations == 0
    assert compiled == [1, 0]  # an alpha that no other test has; one search, and not what scores the references


def test_translations_begin_with_their_prefixes(run):
    found = run.translate(["zwei", "drei"], prefixes=["six", "one"], max_extra_length=5)
    assert [text[:3] for text in found] == ["six", "one"]
    assert run.translate(["zwei"], prefixes="six", max_extra_length=5) == found[:1]


def test_parameters_are_on_the_devices_once_for_all_settings(run):
    translators = [run.translator(sampling=Sampling(seed=seed), num_devices=2) for seed in (5, 6)]
    on_second = [jax.tree.leaves(each.params)[0].addressable_shards[1].data for each in translators]
    assert on_second[0].unsafe_buffer_pointer() == on_second[1].unsafe_buffer_pointer()


def test_a_string_is_not_taken_for_several_lines_of_attention(run):
    with pytest.raises(UserError, match="attentions takes a list of lines, not a string"):
        run.attentions("zwei")
    assert next(run.attentions(iter(["zwei"]), iter(["two"]))).source.words == ("zwei",)


def test_numbers_of_numpy_choose_checkpoints_too(made):
    assert restore(made, steps=np.int64(25)).params_from == "the moving average at step 25"
    assert restore(made, steps=np.array([10, 25])).params_from == "the mean of the moving averages at steps 10, 25"
    assert restore(f"{made}@10,25").params_from == "the mean of the moving averages at steps 10, 25"
    assert restore(made, average=np.int64(2)).params_from == "the mean of the parameters at steps 30, 34"


def test_a_run_is_shown_in_a_line(run):
    assert repr(run) == f"<Run numbers: the mean of the parameters at steps {BEFORE}, {LAST}>"


def test_a_translator_is_made_once_for_the_same_settings(run, sources):
    assert run.translator() is run.translator()
    greedy = run.translator(beam_size=1)
    assert greedy is run.translator(beam_size=1)
    assert greedy is not run.translator()
    drawn = run.translator(sampling=Sampling(seed=1), nbest=2)
    assert drawn is run.translator(nbest=2, sampling=Sampling(seed=1))
    assert drawn is not run.translator(nbest=2, sampling=Sampling(seed=2))
    for seed in range(100):
        run.translator(sampling=Sampling(seed=seed))
    assert len(run._made) < 100
    greedy = run.translator(beam_size=1)
    run.translator(beam_size=3, nbest=3)  # which a beam of 2, the config's, could not give
    with pytest.raises(UserError, match="the best translation of each line; for more"):
        run.translate(["one"], nbest=2)
    assert run.translate(sources[:3], beam_size=1) == greedy.translate(sources[:3])
    before = greedy.compilations
    run.translate(sources[3:6], beam_size=1)
    assert greedy.compilations == before


def test_threads_may_share_a_run_from_its_first_call_on(run, sources):
    expected = run.translate(sources[:8])
    fresh = dataclasses.replace(run)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert [found for [found] in pool.map(lambda line: fresh.translate([line]), sources[:8])] == expected


def test_a_string_is_no_list_of_lines(run):
    with pytest.raises(UserError, match=r"a list of lines, not a string: \['zwei'\]"):
        run.translate("zwei")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"beam_size": 0}, "beam_size is 0; it must be at least 1"),
        ({"beam_size": "4"}, "beam_size is '4'; it must be a whole number"),
        ({"beam_size": 2.5}, "beam_size is 2.5; it must be a whole number"),
        ({"alpha": math.inf}, "alpha is inf; it must be finite"),
        ({"alpha": "0.6"}, "alpha is '0.6'; it must be a number"),
        ({"min_length": -1}, "min_length is -1; it must be at least 0"),
        ({"max_extra_length": -1}, "max_extra_length is -1; it must be at least 0"),
        ({"max_input_length": 1}, "max_input_length is 1; it must be at least 2"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"window": 0}, "window is 0; it must be at least 1"),
        ({"sampling": 0.7}, r"sampling is 0\.7; it must be a Sampling"),
        ({"num_devices": -1}, "num_devices is -1; it must be at least 0"),
        ({"num_devices": "1"}, "num_devices is '1'; it must be a whole number"),
        ({"nbest": 1.5}, r"nbest is 1\.5; it must be a whole number"),
        ({"refuse_long": "no"}, "refuse_long is 'no'; it must be true or false"),
    ],
    ids=str,
)
def test_a_setting_of_another_type_or_out_of_range_is_refused(run, setting, message):
    with pytest.raises(UserError, match=message):
        run.translator(**setting)


def test_a_setting_may_be_a_number_of_numpy(run):
    ours = run.translator(beam_size=np.int64(2), alpha=np.float32(0.5))
    assert ours is run.translator(beam_size=2, alpha=0.5)


def test_what_is_no_text_and_what_is_no_setting_is_refused_in_words(run):
    with pytest.raises(UserError, match="translate takes a list of strings; line 2 is 7 of type int"):
        run.translate(["zwei", 7])
    with pytest.raises(UserError, match="lines is 'zwei'; it must be a list of lines, not a string"):
        next(run.translator().search("zwei"))
    with pytest.raises(UserError, match=r"attention takes one line, not \['zwei'\]; attentions takes several"):
        run.attention(["zwei"])
    with pytest.raises(UserError, match="'beam' is not a setting of numbers; did you mean 'beam_size'"):
        run.translate(["zwei"], beam=3)
    with pytest.raises(UserError, match="'beam_siez' is not a setting of numbers; did you mean 'beam_size'"):
        run.attention("zwei", "zwei", beam_siez=3)


def test_half_a_character_is_refused(run):
    with pytest.raises(UserError, match=r"a text is 'ab\\ud800', which is not UTF-8 \(surrogates not allowed at 2\)"):
        run.translate(["ab", "ab\ud800"])


def test_a_translator_knows_no_classes(run):
    with pytest.raises(UserError, match="numbers translates and has no classes: use translate"):
        run.classify(["eins"])


def test_the_score_of_a_translation_is_its_probability_token_by_token(run, sources):
    found = [best for best, *_ in run.translator().search(sources)]
    spelt = run.tokenizer.encode([best.text for best in found])
    canonical = [i for i, best in enumerate(found) if best.tokens[:-1] == tuple(spelt[i])]
    assert len(canonical) > 10  # others are spelt in pieces that the tokenizer would not take
    scores = run.score([sources[i] for i in canonical], [found[i].text for i in canonical])
    for i, score in zip(canonical, scores, strict=True):
        assert len(score) == len(found[i].tokens)
        assert sum(score) == pytest.approx(found[i].log_prob, abs=1e-3)


def test_a_split_is_that_of_the_files(finished, run):
    text = finished.parent / "text"
    assert run.split("test") == (lines(text / "test.de"), lines(text / "test.en"))
    with pytest.raises(UserError, match="there is no split 'dev'"):
        run.split("dev")


def test_a_split_that_the_run_has_not_read_is_refused_if_another_one_has_changed(finished, run, tmp_path):
    shutil.copytree(finished.parent / "text", tmp_path / "text")
    for language in ("de", "en"):
        (tmp_path / "text" / f"valid.{language}").write_text("eins\n")
    fingerprints = {name: value for name, value in run.fingerprints.items() if name != "test"}
    config = run.config.copy_and_resolve_references()
    config.data.path = str(tmp_path / "text")
    assert dataclasses.replace(run, fingerprints=fingerprints).split("test") == run.split("test")
    with pytest.raises(UserError, match=r"the valid split of .* has changed"):
        dataclasses.replace(run, config=config, fingerprints=fingerprints).split("test")


def test_an_ensemble_is_the_mean_of_probabilities(finished, run):
    first, second = (restore(finished, steps=[step]) for step in (BEFORE, LAST))
    both = first.ensemble(second)
    assert both.params_from == f"the parameters of step {BEFORE}; the parameters of step {LAST}"
    p, q, mean = (np.exp(np.concatenate(one.score(*run.split("test")))) for one in (first, second, both))
    np.testing.assert_allclose(mean, (p + q) / 2, rtol=1e-3, atol=1e-6)
    assert not np.allclose(p, q, rtol=0.1)


def test_a_run_of_a_gpu_is_used_in_float32_on_a_cpu(tmp_path):
    fields = {"dtype": "bfloat16", "attention_implementation": "cudnn", "d_k": 8, "d_v": 8}
    rounded = restore(make(tmp_path / "run", **{f"model__{name}": value for name, value in fields.items()}))
    assert (rounded.model.config.dtype, rounded.model.config.attention_implementation) == ("float32", "plain")
    rounded.export(tmp_path / "exported")
    assert restore(tmp_path / "exported").config.model.to_dict() == rounded.config.model.to_dict()
    assert rounded.config.model.dtype == "bfloat16"  # kept, so that a GPU resumes in bfloat16


def test_lengths_beyond_the_learned_positions_are_refused_at_once(tmp_path):
    bounds = {"decode__max_input_length": 20, "decode__max_extra_length": 10}
    learned = restore(make(tmp_path / "run", model__positions="learned", model__max_length=32, steps=[0], **bounds))
    learned.translator(max_input_length=22)
    with pytest.raises(
        UserError, match=r"max_input_length \+ max_extra_length is 33; .* has learned only 32 positions"
    ):
        learned.translator(max_input_length=23)
    other = restore(make(tmp_path / "other", steps=[0], **bounds | {"decode__max_extra_length": 13}))
    other.translator()
    with pytest.raises(UserError, match=r"is 33; .* has learned only 32 positions"):
        other.ensemble(learned).translator()


def test_an_ensemble_is_made_of_runs(run, finished):
    with pytest.raises(UserError, match="is not a Run"):
        run.ensemble(str(finished))


def test_an_ensemble_of_one_run_is_that_run(run, sources):
    together, alone = (np.concatenate(one.score(*run.split("test"))) for one in (run.ensemble(run), run))
    np.testing.assert_allclose(together, alone, rtol=1e-4)
    assert run.ensemble().params is run.params


@pytest.fixture
def few_objects():
    """Hides from the collector, for the length of a test, what was there before: JAX keeps millions of objects."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_restoring_a_run_again_and_again_takes_no_more_memory(finished):
    def objects() -> int:
        restore(finished)
        gc.collect()
        return len(gc.get_objects())

    objects()
    before = objects()
    assert max(objects() for _ in range(3)) - before < 500


def test_a_run_with_other_parameters_is_another_model(finished, run, sources):
    earlier = restore(finished, steps=BEFORE)
    ours = run.translate(sources)
    assert dataclasses.replace(run, params=earlier.params).translate(sources) == earlier.translate(sources) != ours
    assert run.translate(sources) == ours


# Which parameters


STEPS = (10, 20, 25, 30, 34)  # 25, the best so far, and 34, the last, are not at the interval


def make(path: pathlib.Path, *, words: str = "one two three", steps=STEPS, **overrides) -> pathlib.Path:
    """A run's directory as training leaves it, with parameters at random."""
    config = small_config(checkpoint__every=10, checkpoint__keep=5, eval__final_average=2, **overrides)
    tokenizer = Tokenizer.train([words] * 3, 270)
    workdir = RunDirectory(path)
    workdir.claim(config, {"train": "abc"}, tokenizer)
    shapes = jax.eval_shape(lambda: init_params(model_config(config, tokenizer.vocab_size), jax.random.key(0)))
    checkpoints = Checkpoints(workdir.checkpoints, every=10, keep=5, seed=0)
    for step in steps:
        params = random_like(shapes, step)
        ema = random_like(shapes, 1000 + step) if config.ema_decay else None
        state = TrainState.create(0, params, optax.sgd(0.1)).replace(step=jnp.int32(step), ema=ema)
        checkpoints.save(state, {})
    checkpoints.close()
    return path


def random_like(shapes, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.array(rng.normal(size=leaf.shape), jnp.float32), shapes)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made") / "run", ema_decay=0.9)


@pytest.fixture(scope="module")
def single(made):
    """The parameters of each step alone."""
    return {step: restore(made, average=1, steps=[step]).params for step in STEPS}


@pytest.mark.parametrize(
    ("which", "steps", "params_from"),
    [
        ({"average": 1}, [34], "the parameters of step 34"),
        ({"average": 2}, [30, 34], "the mean of the parameters at steps 30, 34"),
        ({"average": 3}, [20, 30, 34], "the mean of the parameters at steps 20, 30, 34"),
        ({"average": 9}, [10, 20, 30, 34], "the mean of the parameters at steps 10, 20, 30, 34"),
        ({"average": 1, "steps": [25]}, [25], "the parameters of step 25"),
        ({"average": 1, "steps": 25}, [25], "the parameters of step 25"),
        ({"average": 1, "steps": [34, 10, 25, 10]}, [10, 25, 34], "the mean of the parameters at steps 10, 25, 34"),
    ],
    ids=str,
)
def test_the_parameters_are_the_mean_of_those_that_are_named(made, single, which, steps, params_from):
    run = restore(made, **which)
    assert run.params_from == params_from
    explicit = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0, dtype=np.float64), *(single[s] for s in steps))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), run.params, explicit)
    assert {leaf.dtype for leaf in jax.tree.leaves(run.params)} == {np.dtype(np.float32)}
    assert_same(run.params, restore(made, **which).params)  # each time


def test_a_restored_mean_is_to_the_bit_that_of_the_run_s_own_evaluation(finished, run):
    config = run.config.checkpoint
    checkpoints = Checkpoints(finished / "checkpoints", every=config.every, keep=config.keep, seed=0)
    newest = restore(finished, steps=[LAST]).params
    average, choice = checkpoints.average(newest, LAST, run.config.eval.final_average)
    checkpoints.close()
    assert choice.steps == [BEFORE, LAST]
    assert_same(run.params, average)


def test_a_checkpoint_that_training_deletes_meanwhile_is_no_longer_chosen(made, tmp_path, monkeypatch):
    training = shutil.copytree(made, tmp_path / "training")

    def delete_oldest_first(checkpoints, step, *arguments, **settings):
        shutil.rmtree(checkpoints / "10", ignore_errors=True)
        return load_params(checkpoints, step, *arguments, **settings)

    monkeypatch.setattr(trained_model, "load_params", delete_oldest_first)
    assert restore(training, average=4).params_from == "the mean of the parameters at steps 20, 30, 34"
    with pytest.raises(UserError, match=r"has no checkpoints of steps \[10\]; it has those of 20, 25"):
        restore(training, steps=[10, 20])


def test_by_default_they_are_those_of_the_last_evaluation(made, tmp_path):
    kept = restore(made)
    assert kept.params_from == "the moving average at step 34"
    assert_same(kept.params, random_like(kept.params, 1034))
    assert_same(restore(made, average="ema").params, kept.params)
    assert_same(restore(made, steps=25).params, random_like(kept.params, 1025))
    plain = make(tmp_path / "plain", steps=(10, 20))
    assert restore(plain).params_from == "the mean of the parameters at steps 10, 20"
    with pytest.raises(UserError, match=r"plain has kept no moving average: its config\.ema_decay is 0"):
        restore(plain, average="ema")


@pytest.mark.parametrize(
    ("name", "average", "params_from"),
    [
        ("run", None, "the moving average at step 34"),
        ("run", 2, "the mean of the parameters at steps 30, 34"),
        ("run", "ema", "the moving average at step 34"),
        ("run@25", None, "the moving average at step 25"),
        ("run@10,25", None, "the mean of the moving averages at steps 10, 25"),
        ("run@20", "ema", "the moving average at step 20"),
        ("run@20", 1, "the parameters of step 20"),
        ("run@10,25", 1, "the mean of the parameters at steps 10, 25"),
    ],
    ids=str,
)
def test_a_run_is_named_with_or_without_steps(made, name, average, params_from):
    assert restore(made.parent / name, average=average).params_from == params_from


def test_a_directory_may_have_an_at_in_its_name(tmp_path):
    make(tmp_path / "lr@high", steps=(10,))
    assert restore(tmp_path / "lr@high").params_from == "the parameters of step 10"
    assert restore(tmp_path / "lr@high@10").params_from == "the parameters of step 10"


# What cannot be had


@pytest.mark.parametrize("average", ["best", "", "2.5", 0, -1, 1.5], ids=repr)
def test_an_average_that_is_none_is_refused(made, average):
    with pytest.raises(UserError) as refusal:
        restore(made, average=average)
    assert repr(average) in str(refusal.value)
    assert "number of checkpoints" in str(refusal.value)


@pytest.mark.parametrize("steps", [[10, 15], 0, [], "25"], ids=repr)
def test_a_missing_step_is_refused_with_those_that_are_there(made, steps):
    with pytest.raises(UserError, match=r"run has no checkpoints of steps .*; it has those of 10, 20, 25, 30, 34"):
        restore(made, steps=steps)


def test_runs_with_different_tokenizers_are_no_ensemble(made, tmp_path):
    other = restore(make(tmp_path / "other", words="four five six", steps=(10,)))
    with pytest.raises(UserError, match="different tokenizers"):
        restore(made).ensemble(other)


def test_runs_of_opposite_directions_are_no_ensemble(made):
    run = restore(made)
    config = run.config.copy_and_resolve_references()
    config.data.update(source_language="de", target_language="en")
    with pytest.raises(UserError, match=r"different config\.data\.source_language"):
        run.ensemble(dataclasses.replace(run, config=config))


def refused(path) -> str:
    with pytest.raises(UserError) as refusal:
        restore(path)
    return str(refusal.value)


def test_a_directory_without_a_run_without_a_checkpoint_or_without_a_tokenizer_is_named(made, tmp_path):
    assert str(tmp_path / "nowhere") in refused(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("milk")
    assert str(tmp_path) in refused(tmp_path)
    fresh = tmp_path / "fresh"
    shutil.copytree(made, fresh, ignore=shutil.ignore_patterns("checkpoints"))
    assert refused(fresh) == f"{fresh} holds no checkpoint yet; a run writes one every 10 steps"
    (fresh / "checkpoints/10.orbax-checkpoint-tmp").mkdir(parents=True)
    assert "holds no checkpoint yet" in refused(fresh)
    (fresh / "tokenizer.json").unlink()
    assert str(fresh / "tokenizer.json") in refused(fresh)


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def cut_short(path):
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:50])


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("state/_METADATA", remove),
        ("state/manifest.ocdbt", remove),
        ("state/ocdbt.process_0", remove),
        ("state/ocdbt.process_0/d", cut_short),
        ("state", remove),
        (".", cut_short),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("few_objects")
def test_a_checkpoint_that_is_not_whole_is_named_with_the_others_and_nothing_else_complains(
    made, tmp_path, part, damage, caplog
):
    broken = tmp_path / "broken"
    shutil.copytree(made, broken)
    damage(broken / "checkpoints/34" / part)
    message = refused(broken)
    gc.collect()  # reads that were given up in the middle would complain now
    assert not [record for record in caplog.records if record.name == "asyncio"]
    assert message.startswith(f"the checkpoint {broken / 'checkpoints/34'} ")
    assert "10, 20, 25, 30" in message
    assert len(message) < 500
    assert "<class" not in message
    assert restore(broken, steps=[30]).params_from == "the moving average at step 30"


@pytest.mark.parametrize(("section", "field"), [(None, "ema_decay"), ("data", "num_pairs"), ("decode", "window")])
def test_a_run_of_another_version_is_refused_with_the_field_that_it_lacks(made, tmp_path, section, field):
    old = tmp_path / "old"
    shutil.copytree(made, old)
    written = json.loads((old / "config.json").read_text())
    del written["crc32"]
    config = written["config"]
    del (config[section] if section else config)[field]
    (old / "config.json").write_text(json.dumps(written))
    message = refused(old)
    assert str(old / "config.json") in message
    assert field in message


def test_of_a_newer_version_only_fields_that_translations_may_not_need_are_unknown_and_told_of(made, tmp_path, caplog):
    written = json.loads((made / "config.json").read_text())
    del written["crc32"]
    for section in "data", "decode", "model":
        newer = tmp_path / section
        shutil.copytree(made, newer)
        config = written["config"] | {section: written["config"][section] | {"num_novelties": 1}}
        (newer / "config.json").write_text(json.dumps(written | {"config": config}))
    assert restore(tmp_path / "data").params_from == restore(made).params_from
    assert [record.message for record in caplog.records] == [
        "this version does not know config.data.num_novelties of the run's config, and ignores it"
    ]
    for section in "decode", "model":
        message = refused(tmp_path / section)
        assert f"config.{section}.num_novelties is " in message
        assert "; a run of a newer version needs that version, and a kind of your own must be registered" in message


def test_an_ensemble_takes_the_members_of_another(made):
    first, second, third = (restore(made, steps=[step]) for step in (10, 20, 30))
    nested, flat = first.ensemble(second.ensemble(third)), first.ensemble(second, third)
    for run, member in zip(nested.partners, (second, third), strict=True):
        assert run.params is member.params
    assert nested.params_from == flat.params_from
