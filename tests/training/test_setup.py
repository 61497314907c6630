"""Everything that can be checked is checked before any long work starts."""

import gc
import json
import os
import re
import shutil
import types
import weakref
from unittest import mock

import jax
import numpy as np
import pytest
import tokenizers

from tests.forked import run
from tests.training.small import final_state, small_config, write_text
from transformer_flax.console import Progress
from transformer_flax.data.sources import load_pairs
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.model.registry import make_model
from transformer_flax.run import restore
from transformer_flax.special_tokens import NUM_SPECIAL
from transformer_flax.training import config_checks, setup
from transformer_flax.training.compiled import Programs
from transformer_flax.training.config_checks import check, check_text, device_dtype, model_config
from transformer_flax.training.evaluation import Task
from transformer_flax.training.loop import train
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.setup import checked_config, prepare_run, set_up_devices, train_tokenizer
from transformer_flax.training.trained_model import load_setup


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("accumulation_steps", 0),
        ("label_smoothing", 1.0),
        ("ema_decay", 1.0),
        ("ema_decay", -0.1),
        ("data.tokens_per_batch", 0),
        ("data.tokens_per_batch", 10**12),
        ("data.max_length", 1),
        ("decode.alpha", float("inf")),
        ("decode.beam_size", 0),
        ("decode.max_extra_length", -1),
        ("decode.min_length", -1),
        ("decode.window", 0),
        ("eval.every", -1),
        ("checkpoint.every", 0),
        ("checkpoint.keep", 0),
        ("log.every", 0),
        ("data.held_out", 1.0),
        ("data.max_length_ratio", 0.5),
        ("optimizer.warmup_steps", 0),
        ("optimizer.eps", 0.0),
        ("optimizer.factor", -1.0),
        ("optimizer.b1", 1.0),
        ("optimizer.b2", -0.1),
        ("optimizer.clip_norm", -1.0),
        ("parallel.num_devices", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    config = small_config()
    config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=rf"config\.{field} is {value}"):
        check(config)


@pytest.mark.parametrize("fields", [{"accumulation_steps": 3}, {"loss_chunks": 5}, {"parallel__num_devices": 3}])
def test_rows_that_cannot_be_divided_are_refused(fields):
    with pytest.raises(UserError, match=r"config\.data\.rows_multiple_of is 8; it must be a multiple of (3|5)"):
        check(small_config(**fields))


@pytest.mark.parametrize("field", ["seed", "model.d_ff", "eval.every"])
def test_none_is_refused_by_name(field):
    config = small_config()
    section = config
    *sections, last = field.split(".")
    for name in sections:
        section = section[name]
    section[last] = None
    with pytest.raises(UserError, match=rf"config\.{field} is None"):
        check(config)


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("data.batching", "grouped", "bucketed, packed"),
        ("optimizer.name", "adagrad", "adam, muon, schedule_free"),
        ("parallel.mode", "mpi", "jit, pmap"),
        ("on_write_failure", "wait", "stop, go on"),
    ],
)
def test_a_choice_that_there_is_not_is_refused(field, value, known):
    config = small_config()
    config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=rf"config\.{field} is '{value}'; it must be one of {known}"):
        check(config)


def test_a_length_penalty_that_is_none_of_ours_is_refused():
    with pytest.raises(UserError, match="length_penalty is 'google'; it must be one of gnmt, length, none"):
        check(small_config(decode__length_penalty="google"))


@pytest.mark.parametrize(
    ("batching", "field"), [("bucketed", "data.length_multiple_of"), ("packed", "data.max_length")]
)
def test_cudnns_attention_wants_batches_of_even_width(batching, field):
    fused = {"model__attention_implementation": "cudnn", "model__dtype": "bfloat16", "data__batching": batching}
    even = {"data__length_multiple_of": 2, "data__max_length": 64} | fused
    for dtype in ("bfloat16", "auto"):
        checked = checked_config(small_config(**even | {"model__dtype": dtype}))
        assert checked.model.dtype == "bfloat16"
    odd = small_config(**even | {field.replace(".", "__"): 63})
    with pytest.raises(UserError, match=rf"config\.{field} is 63; it must be even for cuDNN's attention"):
        check(odd)


def test_packed_rows_must_fit_into_a_batch():
    check(small_config(data__batching="packed", data__max_length=64, data__rows_multiple_of=8))
    for longest in (65, 10**9):
        config = small_config(data__batching="packed", data__max_length=longest, data__rows_multiple_of=8)
        least = f"{8 * longest:,}"
        with pytest.raises(UserError, match=rf"tokens_per_batch is 512; it must be at least {least} when packed"):
            check(config)


@pytest.mark.parametrize(
    ("platform", "capability", "dtype"),
    [
        ("cpu", "", "float32"),
        ("gpu", "7.5", "float32"),
        ("gpu", "10.0", "bfloat16"),
        ("gpu", "gfx90a", "bfloat16"),
        ("tpu", "", "bfloat16"),
    ],
)
def test_the_type_of_the_computation_is_chosen_by_the_device(monkeypatch, platform, capability, dtype):
    device = types.SimpleNamespace(platform=platform, **({"compute_capability": capability} if capability else {}))
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert device_dtype() == dtype
    assert checked_config(small_config(model__dtype="auto")).model.dtype == dtype
    given = checked_config(small_config(model__dtype="bfloat16"))
    assert given.model.dtype == model_config(given, 300).dtype == "bfloat16"


def test_a_run_says_which_type_was_chosen_and_keeps_it(monkeypatch, finished):
    run, monkeypatched = RunDirectory(finished), "transformer_flax.training.setup.device_dtype"
    monkeypatch.setattr(monkeypatched, lambda: "bfloat16")  # as if it were resumed on a GPU
    assert (
        run.load_config().model.dtype == checked_config(small_config(model__dtype="auto"), run).model.dtype == "float32"
    )


def test_a_deterministic_run_asks_xla_for_such_kernels_once_and_keeps_its_other_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=somewhere")
    for deterministic in (False, True, True):
        checked_config(small_config(deterministic=deterministic))
    assert os.environ["XLA_FLAGS"].split() == ["--xla_dump_to=somewhere", "--xla_gpu_deterministic_ops=true"]


@pytest.mark.parametrize("source", ["numbers", "folder", "tfds"])
def test_one_language_on_both_sides_is_refused(source):
    config = small_config(data__source=source, data__source_language="de")
    with pytest.raises(UserError, match=r"source_language and config\.data\.target_language are both 'de'; set one"):
        check(config)
    config.data.source = "copy"  # has none
    check(config)


@pytest.mark.parametrize("source", ["numbers", "reverse", "tfds"])
def test_only_files_have_texts_held_out_for_validation(source, tmp_path):
    config, run = small_config(data__source=source, data__held_out=0.1), RunDirectory(tmp_path)
    with pytest.raises(UserError, match=rf"data\.held_out is 0\.1; it must be 0\.0 with source {source}"):
        checked_config(config, run)
    run.config_file.write_text(json.dumps({"config": config.to_dict(), "data_fingerprints": {}}))
    checked_config(config, run)  # a run that an older version began


def test_text_that_is_made_has_no_folder(tmp_path):
    config, run = small_config(data__source="numbers", data__path="texts"), RunDirectory(tmp_path)
    with pytest.raises(UserError, match=r"data\.path has no effect with source numbers, .* configs/multi30k\.py$"):
        checked_config(config, run)
    run.config_file.write_text(json.dumps({"config": config.to_dict(), "data_fingerprints": {}}))
    checked_config(config, run)  # a run that an older version began


def test_pmap_keeps_all_parameters_on_each_device_and_is_for_one_process(monkeypatch):
    with pytest.raises(UserError, match=r"config\.parallel\.shard_params is True; it must be False with pmap"):
        check(small_config(parallel__mode="pmap", parallel__shard_params=True))
    monkeypatch.setattr(config_checks, "share", lambda: (0, 2))
    for name, value, only in (("parallel.mode", "pmap", "jit"), ("on_write_failure", "go on", "stop")):
        with pytest.raises(
            UserError, match=rf"config\.{name} is '{value}'; it must be '{only}' with several processes"
        ):
            check(small_config(**{name.replace(".", "__"): value}))


def test_what_is_averaged_must_be_kept():
    for average in ("average", "final_average"):
        with pytest.raises(UserError, match=r"config\.checkpoint\.keep is 2; it must be at least 3"):
            check(small_config(**{f"eval__{average}": 3}))
    check(small_config(eval__final_average=3, ema_decay=0.9))  # which averages no checkpoints


def test_an_unknown_source_of_text_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"config\.data\.source is 'folders'; it must be one of numbers, copy, rev"):
        check(small_config(data__source="folders"))


def test_learned_positions_must_reach_as_far_as_a_translation():
    check(small_config(model__positions="learned", model__max_length=64))
    with pytest.raises(UserError, match=r"config\.model\.max_length is 63; it must be at least 64"):
        check(small_config(model__positions="learned", model__max_length=63))
    with pytest.raises(UserError, match=r"config\.model\.max_length is 64; it must be at least 65"):  # 60 + 5
        check(small_config(model__positions="learned", model__max_length=64, decode__max_input_length=60))


def test_an_unknown_kind_of_tokenizer_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"config\.data\.tokenizer is 'unigram'; it must be one of bpe, wordpiece, w"):
        check(small_config(data__tokenizer="unigram"))
    with pytest.raises(UserError, match=r"config\.data\.tokenizer is 'words'; it must be bpe or wordpiece, to"):
        check(small_config(data__tokenizer="words"))


def test_a_table_of_labels_is_not_translated(tmp_path):
    config, run = small_config(data__source="tsv"), RunDirectory(tmp_path)
    with pytest.raises(UserError, match=r"config\.data\.source is 'tsv', whose targets are labels; to translate, make"):
        checked_config(config, run)
    run.config_file.write_text(json.dumps({"config": config.to_dict(), "data_fingerprints": {}}))
    checked_config(config, run)  # a run that an older version began


def test_a_vocabulary_that_is_to_be_trained_has_room_for_every_byte():
    with pytest.raises(UserError, match=r"config\.data\.vocab_size is 258; it must be at least 259"):
        check(small_config(data__vocab_size=258))
    with pytest.raises(UserError, match=r"config\.data\.vocab_size is 4; it must be at least 5"):
        check_text(small_config(data__tokenizer="words", data__vocab_size=4))


@pytest.fixture
def own(tmp_path):
    """A tokenizer of one's own: 20 pieces, all of them letters."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(
        special_tokens=["<pad>", "<begin>", "<end>", "?"], show_progress=False
    )
    backend.train_from_iterator(["a b c d e f g h i j k l w x y z"], trainer)
    backend.enable_truncation(1)
    backend.save(str(tmp_path / "own.json"))
    return tmp_path / "own.json"


def test_a_tokenizer_file_is_checked_before_anything_else(own, tmp_path):
    check(small_config(data__tokenizer_file=str(own), data__vocab_size=20))
    with pytest.raises(
        UserError, match=r"vocab_size is 300, and .*own\.json has 20 tokens; set --config.*vocab_size=20"
    ):
        check(small_config(data__tokenizer_file=str(own)))
    with pytest.raises(UserError, match=r"nowhere\.json cannot be read as a tokenizer: No such file"):
        check(small_config(data__tokenizer_file=str(tmp_path / "nowhere.json")))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.en").write_text("a b\nc\n\n" + "d " * 50 + "\n")
        (folder / f"{split}.de").write_text("x y\nz\nw\nv\n")
    return folder


def test_sentences_that_are_left_out_are_counted(folder, tmp_path, capsys):
    config = small_config(data__path=str(folder), data__max_length=20, steps=1, eval__test=True)
    config.data.cache_dir = str(tmp_path / "cache")
    evaluations = train(config, tmp_path / "run")
    told = capsys.readouterr().out
    for reason in ("an empty side", "more than 20 tokens"):
        assert re.search(rf"{reason} +│ +1 ", told)
    assert re.search(r"trained on +│ +2 of 4 ", told)
    counts = json.loads((tmp_path / "run/selection.json").read_text())
    assert counts == {"used": 2, "left out": {"an empty side": 1, "more than 20 tokens": 1}}
    assert len(evaluations["test"].outputs) == 4  # never left out of test
    assert evaluations["test"].outputs[2] == ""


@pytest.mark.parametrize("target", ["x @ y", "x@@ y", "▁x ▁y"])
def test_targets_in_pieces_of_words_are_warned_of(folder, tmp_path, capsys, target):
    (folder / "valid.de").write_text(f"{target}\n" * 4)
    config = small_config(data__path=str(folder), data__cache_dir=str(tmp_path / "cache"))
    with Progress() as progress:
        prepare_run(config, RunDirectory(tmp_path / "run"), progress)
    warned = f"WARNING: in the valid split, 4 of 4 references are pieces of words, such as '{target}'"
    assert (warned in capsys.readouterr().out) == ("@@" in target or "▁" in target)


def test_other_steps_than_the_learning_rate_was_meant_for_are_told(folder, tmp_path, capsys):
    own = {"data__path": str(folder), "data__max_length": 20, "data__cache_dir": str(tmp_path / "cache")}
    more, fewer = "was 4 and is now 6. The learning rate", "was 6 and is now 5. The learning rate"
    cooled = [(4, 0.5, ""), (4, 0.5, ""), (6, 0.5, more), (5, 0.5, fewer)]
    for steps, cooldown, told in [*cooled, (4, 0.0, ""), (6, 0.0, "")]:
        config = checked_config(small_config(**own, steps=steps, optimizer__cooldown=cooldown))
        with Progress() as progress:
            prepare_run(config, RunDirectory(tmp_path / f"run{cooldown}"), progress)
        said = capsys.readouterr().out
        assert ("WARNING: config.steps" in said) == bool(told)
        assert told in said


@pytest.mark.parametrize(
    ("fields", "share"), [({}, 1), ({"decode__max_input_length": 100_000}, 1), ({"accumulation_steps": 2}, 2)]
)
def test_an_evaluation_takes_no_larger_batches_than_a_step_of_training(tmp_path, monkeypatch, fields, share):
    monkeypatch.setattr("transformer_flax.training.evaluation.GAIN_SENTENCES", 7)
    config = checked_config(small_config(data__path=str(write_text(tmp_path)), data__tokens_per_batch=1024, **fields))
    with Progress(quiet=True) as progress:
        parallel = set_up_devices(config, progress)
        prepared = prepare_run(config, RunDirectory(tmp_path / "run"), progress)
        evaluator = Programs(prepared, parallel, progress).evaluators["valid"]
    for batches in (evaluator._batches, *evaluator._gain_batches):
        assert all(rows * width <= 1024 // share for rows, width in batches.shapes)
    for batches in evaluator._gain_batches:  # of the first sentences alone
        assert sum(len(batches.pairs(k)) for k in range(batches.batches_per_epoch)) == 7


def test_the_text_of_the_train_split_is_let_go_of(folder, tmp_path, monkeypatch):
    read = {}

    def remembered(config, split):
        pairs = load_pairs(config, split)
        read[split] = weakref.ref(pairs)
        return pairs

    monkeypatch.setattr("transformer_flax.training.setup.load_pairs", remembered)
    config = small_config(data__path=str(folder), data__cache_dir=str(tmp_path / "cache"))
    with Progress() as progress:
        prepared = prepare_run(config, RunDirectory(tmp_path / "run"), progress)
    gc.collect()
    assert {split for split in read if read[split]() is not None} == set(prepared.pairs) == {"valid"}
    assert set(prepared.corpora) == {"train", "valid"}


def test_a_tokenizer_of_one_s_own_is_used_and_is_the_run_s(own, folder, tmp_path, capsys):
    config = small_config(
        data__path=str(folder),
        data__cache_dir=str(tmp_path / "cache"),
        data__tokenizer_file=str(own),
        data__vocab_size=20,
    )
    run = RunDirectory(tmp_path / "run")

    def prepare():
        checked = checked_config(config, run)
        with Progress() as progress:
            set_up_devices(checked, progress)
            prepare_run(checked, run, progress)

    prepare()
    told = capsys.readouterr().out
    assert "with a vocabulary of 20," in told
    assert "vocabulary 20\n1 batches an epoch, 6.0 epochs; " in told
    assert "training the tokenizer" not in told
    _, tokenizer, model = load_setup(run)
    assert model.vocab_size == 20
    assert tokenizer.pieces("d d é") == ["d", "d", "?", "<end>"]
    assert "WARNING: the tokenizer restores 3 of 4 targets of the valid split: 'v' becomes '?'." in told

    moved = own.rename(tmp_path / "moved.json")  # the path is free, what it holds is not
    config.data.tokenizer_file = str(moved)
    prepare()
    moved.write_text(moved.read_text().replace('"z"', '"Z"'))
    with pytest.raises(UserError, match=r"the tokenizer given is not \S+run/tokenizer\.json"):
        prepare()


def test_a_tokenizer_of_sources_alone_is_kept_apart_from_that_of_both_sides(folder, tmp_path):
    config = small_config(data__cache_dir=str(tmp_path / "cache"), data__path=str(folder), data__tokenizer="words")
    for language, line in (("en", "a b"), ("de", "x")):
        (folder / f"train.{language}").write_text(2 * f"{line}\n")
    pairs = load_pairs(config.data, "train")
    for sources_only, size in ((False, 3), (True, 2), (False, 3)):
        tokenizer = train_tokenizer(pairs, config, Progress(quiet=True), sources_only=sources_only)
        assert tokenizer.vocab_size == NUM_SPECIAL + 1 + size  # one for all other words


def test_with_bpe_dropout_each_epoch_has_spellings_of_its_own(folder, tmp_path):
    for language in ("en", "de"):
        (folder / f"train.{language}").write_text("hello world\n" * 20)
    own = {"data__path": str(folder), "data__cache_dir": str(tmp_path / "cache"), "data__bpe_dropout": 0.5}
    prepared = prepare_run(small_config(**own), RunDirectory(tmp_path / "run"), Progress(quiet=True))
    epochs = [prepared.train.corpus_of(epoch * prepared.train.batches_per_epoch) for epoch in (0, 1)]
    texts = [[corpus.source[i].tolist() for i in range(20)] for corpus in (prepared.corpora["train"], *epochs)]
    assert len({*map(tuple, texts[0])}) == 1 < len({*map(tuple, texts[1])})
    assert texts[1] != texts[2]


def test_runs_with_different_seeds_have_the_tokenizer_and_the_spellings_of_the_seed_of_their_text(monkeypatch):
    made, sampled, indices = mock.Mock(), mock.Mock(return_value=["a"]), np.arange(3)
    made.return_value.too_long.return_value = 0
    monkeypatch.setattr(setup, "BpeDropout", made)
    monkeypatch.setattr(setup, "sample_texts", sampled)
    monkeypatch.setattr(setup, "cached_tokenizer", lambda pairs, config, train, **_: train())
    config = small_config(data__bpe_dropout=0.1, data__max_length=20, data__seed=7, seed=5)
    train_tokenizer("pairs", config, Progress(quiet=True))
    assert sampled.call_args.args == ("pairs", config.data.tokenizer_sample, 7)
    setup._bpe_dropout("corpus", indices, "tokenizer", config, Progress(quiet=True))
    assert made.call_args.args[:5] == ("corpus", "tokenizer", 0.1, 20, 7)
    made.return_value.too_long.assert_called_once_with(indices, 5)


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_of_the_tokenizer_are_shown_on_a_terminal_only(folder, tmp_path, monkeypatch, capsys, terminal):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    config = small_config(data__path=str(folder), data__cache_dir=str(tmp_path / "cache"))
    with Progress() as progress:
        prepare_run(config, RunDirectory(tmp_path / "run"), progress)
    told = capsys.readouterr().out
    if terminal:
        assert re.search(r"training the tokenizer.*reading text.*making the vocabulary", told, re.DOTALL)
    else:
        assert told.startswith("training the tokenizer\ntraining pairs left out\n")


def test_word_pieces_are_trained_and_kept_for_a_run_as_any_tokenizer(folder, tmp_path):
    config = small_config(
        data__path=str(folder), data__cache_dir=str(tmp_path / "cache"), data__tokenizer="wordpiece", steps=1
    )
    run = RunDirectory(tmp_path / "run")
    prepared = prepare_run(config, run, Progress(quiet=True))
    saved = json.loads((tmp_path / "run/tokenizer.json").read_text())
    assert saved["model"]["type"] == "WordPiece"
    [ids] = run.load_tokenizer().encode(["a b"])
    assert ids == prepared.tokenizer.encode(["a b"])[0]
    assert run.load_tokenizer().decode(ids) == "a b"


def test_a_split_that_has_changed_is_not_evaluated(finished, tmp_path):
    text, run = shutil.copytree(finished.parent / "text", tmp_path / "text"), restore(finished)
    run.config.data.path = str(text)
    assert run.split("test")
    (text / "test.en").write_text((text / "test.en").read_text() + "one\n")
    (text / "test.de").write_text((text / "test.de").read_text() + "eins\n")
    with pytest.raises(UserError, match=r"the test split of .* has changed since the run was made"):
        run.split("test")


def test_a_tokenizer_put_in_place_of_the_run_s_is_refused(folder, tmp_path):
    given = {"data__path": str(folder), "data__cache_dir": str(tmp_path / "cache"), "data__max_length": 20}
    config = small_config(**given, steps=1)
    run = tmp_path / "run"
    train(config, run)
    theirs = restore(run).tokenizer.vocab_size
    other = Tokenizer.train(["some other text, with many other words, for a larger vocabulary"] * 9, 260)
    assert other.vocab_size == 260 != theirs
    (run / "tokenizer.json").write_text(other.to_json(), encoding="utf-8")
    config.steps = 2
    for attempt in (lambda: restore(run), lambda: train(config, run)):
        with pytest.raises(UserError, match=r"tokenizer\.json has changed since the run was made"):
            attempt()


def test_a_process_that_does_not_see_what_the_first_has_written_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr("transformer_flax.training.setup.is_first", lambda: False)
    monkeypatch.setattr("transformer_flax.training.setup.share", lambda: (1, 2))
    with pytest.raises(UserError, match=r"process 1 of 2, on .*, does not see .*/run/config\.json"):
        prepare_run(small_config(), RunDirectory(tmp_path / "run"), Progress(quiet=True))


def test_an_empty_training_set_is_refused(folder, tmp_path):
    for language in ("en", "de"):
        (folder / f"train.{language}").write_text("")
    config = small_config(data__path=str(folder))
    with pytest.raises(UserError, match="the train split is empty"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_training_set_of_which_nothing_is_left_is_refused(folder, tmp_path):
    for language in ("en", "de"):
        (folder / f"train.{language}").write_text("\n\n")
    config = small_config(data__path=str(folder), data__cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match="no sentence pairs"):
        train(config, tmp_path / "run")


def test_the_cores_of_a_cpu_act_as_devices_that_train_and_translate_as_any(tmp_path):
    write_text(tmp_path)
    fields = {"data__path": str(tmp_path), "data__cache_dir": str(tmp_path / "cache"), "steps": 3}
    code = f"""
from tests.training.small import small_config
from transformer_flax.training.loop import train
train(small_config(parallel__num_devices=0, parallel__cpu_devices=2, **{fields}), {str(tmp_path / "divided")!r})
"""
    result = run("-c", code, JAX_NUM_CPU_DEVICES="-1")
    assert result.returncode == 0, result.stderr
    assert "on 2 x cpu" in result.stdout
    train(small_config(parallel__num_devices=2, **fields), tmp_path / "of_eight")
    divided, of_eight = (final_state(tmp_path / name, 3) for name in ("divided", "of_eight"))
    jax.tree.map(np.testing.assert_array_equal, divided.params, of_eight.params)
    outputs = [(tmp_path / name / "translations/3.txt").read_text() for name in ("divided", "of_eight")]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(("num_devices", "searching"), [(0, 8), (3, 3)])
def test_evaluations_search_on_the_devices_that_the_run_may_use(tmp_path, num_devices, searching):
    write_text(tmp_path)
    config = small_config(data__path=str(tmp_path), data__cache_dir=str(tmp_path / "cache"))
    config.parallel.num_devices = num_devices
    with Progress() as progress:
        prepared = prepare_run(config, RunDirectory(tmp_path / "run"), progress)
    task = Task(prepared, make_model(model_config(config, prepared.tokenizer.vocab_size)))
    assert task.decoder({}).num_devices == searching


def test_a_number_of_cpu_devices_that_jax_knows_stays():
    code = """
import jax
from transformer_flax.training.sharding import divide_cpu
{before}
divide_cpu(2)
print(jax.device_count())
"""
    given = run("-c", code.format(before="jax.config.update('jax_num_cpu_devices', 3)"), JAX_NUM_CPU_DEVICES="-1")
    assert (given.stdout, given.stderr) == ("3\n", "")
    flag = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    assert run("-c", code.format(before=""), JAX_NUM_CPU_DEVICES="-1", **flag).stdout == "3\n"
    late = run("-c", code.format(before="jax.devices()"), JAX_NUM_CPU_DEVICES="-1")
    assert late.stdout == "1\n"
    assert "config.parallel.cpu_devices is 2, but JAX uses the CPU as one device already" in late.stderr
