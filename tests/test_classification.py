"""The encoder alone, the whole way: from tab-separated files to labels, in Python and from the shell."""

import dataclasses
import json
import pathlib
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import classifier
from tests.commands.process import refused, succeeds
from tests.training.small import final_state
from transformer_flax.analysis.plots import plot_confusion
from transformer_flax.data.classes import Classes
from transformer_flax.errors import UserError
from transformer_flax.files import read_json_lines
from transformer_flax.model.registry import attention_maps
from transformer_flax.relatives.classifier import Classifier
from transformer_flax.relatives.vector_files import Vectors
from transformer_flax.run import restore
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL
from transformer_flax.training.config_checks import check
from transformer_flax.training.loop import train
from transformer_flax.training.loss import classification_loss

WORDS = {"animal": ["cat", "dog", "cow"], "colour": ["red", "blue", "green"], "number": ["two", "ten", "six"]}
FILLERS = ["the", "a", "of", "is", "seen", "here", "again"]
LAST = 60


def write_texts(folder):
    """Texts of three classes, each with a word that tells its own."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 300), ("test", 40)):
        rows = []
        for _ in range(count):
            label = str(rng.choice(list(WORDS)))
            text = [*rng.choice(FILLERS, rng.integers(1, 5)), rng.choice(WORDS[label])]
            rows.append(f"{rng.permutation(text).tolist()}\t{label}\t{' '.join(rng.permutation(text))}\n")
        (folder / f"{split}.tsv").write_text("".join(rows))
    return folder


def config_for(folder, **overrides):
    config = classifier.get_config()
    config.steps = LAST
    config.model.update(num_layers=1, d_model=16, d_ff=16, num_heads=2, d_k=8, d_v=8, dropout=0.1, num_classes=3)
    config.data.update(path=str(folder), cache_dir=str(folder / "cache"), label_column=1, text_column=2)
    config.data.update(vocab_size=300, tokens_per_batch=512, num_buckets=1)
    config.decode.update(max_input_length=5, batch_size=16)  # a quarter of the texts are cut
    config.optimizer.update(factor=1.0, warmup_steps=30)
    config.eval.update(every=30, final_average=1)
    config.checkpoint.update(every=30, keep=2)
    config.log.every = 30
    config.parallel.num_devices = 1
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of the texts, working directory, last evaluations)"""
    folder = write_texts(tmp_path_factory.mktemp("texts"))
    return folder, folder / "run", train(config_for(folder), folder / "run")


@pytest.fixture(scope="module")
def run(trained):
    return restore(trained[1])


def test_a_run_learns_to_tell_classes_apart_and_keeps_what_it_has_put_out(trained):
    folder, workdir, evaluations = trained
    lines = [line.split("\t") for line in (folder / "test.tsv").read_text().splitlines()]
    put_out = (workdir / f"labels/{LAST}.test.txt").read_text().splitlines()
    right = np.mean([label == found for (_, label, _), found in zip(lines, put_out, strict=True)])
    assert evaluations["test"].scalars["accuracy"] == pytest.approx(right)
    assert right > 0.9
    assert evaluations["test"].scalars["macro_f1"] > 0.9
    (last,) = (line for line in read_json_lines(workdir / "metrics.jsonl") if "test/accuracy" in line)
    assert last["test/accuracy"] == pytest.approx(right)
    assert len((workdir / "labels/30.txt").read_text().splitlines()) == len(evaluations["valid"].outputs) > 15


def test_a_vocabulary_of_words_has_those_of_the_text(tmp_path, capsys):
    config = config_for(write_texts(tmp_path), steps=2, data__tokenizer="words", eval__every=0)
    train(config, tmp_path / "run")
    run, words = restore(tmp_path / "run"), len(FILLERS) + sum(map(len, WORDS.values()))
    size = NUM_SPECIAL + 1 + words  # one for all words that the text has not
    count = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    assert f"the text's own vocabulary: {count:,} parameters with a vocabulary of {size}" in capsys.readouterr().out
    assert run.classify(["the zebra", "a heron"]) == run.classify(["the heron", "a zebra"])


def test_what_was_interrupted_goes_on_to_the_bit(trained):
    folder, workdir, evaluations = trained
    again = folder / "again"
    shutil.copytree(workdir, again)
    shutil.rmtree(again / f"checkpoints/{LAST}")
    resumed = train(config_for(folder), again)
    jax.tree.map(np.testing.assert_array_equal, final_state(again, LAST), final_state(workdir, LAST))
    assert resumed["valid"].outputs == evaluations["valid"].outputs


def test_a_run_is_restored_from_its_directory_alone(run, trained, tmp_path):
    _, workdir, evaluations = trained
    shutil.copytree(workdir, tmp_path / "elsewhere")
    run = restore(tmp_path / "elsewhere")
    assert run.classes.names == ("animal", "colour", "number")
    texts, labels = run.split("test")
    assert run.classify(texts) == evaluations["test"].outputs
    probabilities = run.probabilities(texts)
    assert probabilities.shape == (len(texts), 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(
        run.probabilities(texts, batch_size=3, window=7, num_devices=2), probabilities, atol=1e-5
    )
    np.testing.assert_allclose(run.ensemble(run).probabilities(texts), probabilities, atol=1e-5)
    assert run.probabilities([]).shape == (0, 3)
    assert len(run.classify(["", "the cat " * 50])) == 2

    report = run.evaluate(texts, labels)
    for name in ("accuracy", "macro_f1", "perplexity"):
        assert getattr(report, name) == pytest.approx(evaluations["test"].scalars[name], rel=1e-4)
    assert report.labels == evaluations["test"].outputs
    assert repr(report.labels) not in repr(report)
    plot_confusion(report, file=tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_references_are_normalised_as_the_classes_were(trained):
    run = restore(trained[1])
    run.config.data.update(source="folder", lowercase=True)
    assert run.evaluate(["the cat"], ["ANIMAL"]).labels == run.classify(["the cat"])
    np.testing.assert_array_equal(run.probabilities(["THE CAT"]), run.probabilities(["the cat"]))


def test_a_classifier_is_trained_on_for_the_same_classes_only(trained, run, tmp_path):
    folder, workdir, _ = trained
    settings = {"init_from": str(workdir), "steps": 1, "eval__every": 0, "optimizer__factor": 1e-30}
    train(config_for(folder, model__embedding_deviation=0.25, **settings), tmp_path / "same")
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path / "same").params, run.params)
    other = write_texts(tmp_path)
    for file in other.glob("*.tsv"):
        file.write_text(file.read_text().replace("\tanimal\t", "\tbeast\t"))
    with pytest.raises(UserError, match=r"knows the classes animal, colour, number, and this text has beast, colour"):
        train(config_for(other, **settings), tmp_path / "other")
    with pytest.raises(UserError, match=r"kind is 'classifier', but the model of config\.init_from is of another kind"):
        check(config_for(folder, **settings | {"init_from": str(pathlib.Path("tests/data/run_0.1").absolute())}))


def test_word_vectors_start_as_small_as_embeddings_otherwise_do(trained, run, tmp_path):
    size, rng = run.tokenizer.vocab_size, np.random.default_rng(0)
    counts = np.ones(size, np.int64)
    vectors = Vectors.make(run.tokenizer, rng.normal(size=(size, 16)), counts, counts, rng)
    vectors.save(tmp_path / "vectors", {})
    given = {"data__tokenizer_file": str(tmp_path / "vectors/tokenizer.json"), "data__vocab_size": size}
    given |= {"embedding_init": str(tmp_path / "vectors"), "model__embedding_deviation": 0.25}
    train(config_for(trained[0], steps=1, eval__every=0, optimizer__factor=1e-30, **given), tmp_path / "run")
    started = restore(tmp_path / "run").params["embedding"]["embedding"]
    np.testing.assert_array_equal(started, vectors.vectors / 4)


def test_an_exported_classifier_has_its_classes(run, tmp_path):
    run.export(tmp_path / "model")
    texts, _ = run.split("test")
    assert restore(tmp_path / "model").classify(texts) == run.classify(texts)
    with pytest.raises(UserError, match="CTranslate2 runs Transformers alone"):
        run.export(tmp_path / "served", "ctranslate2")


def test_what_a_run_attends_to_is_there_as_arrays(run):
    source = np.array([[*run.tokenizer.encode(["the cat"])[0], END_ID]])
    maps = attention_maps(run.model.config, run.params, source)
    assert {kind: weights.shape for kind, weights in maps.items()} == {"encoder": (1, 1, 2, *2 * source.shape[1:])}


def test_what_a_classifier_does_not_do_is_told(run):
    for attempt in (run.translate, lambda lines: run.attention(lines[0]), lambda lines: run.count_heads()):
        with pytest.raises(UserError, match=r"classifies \(animal, colour, number\) and does not translate"):
            attempt(["the cat"])
    with pytest.raises(
        UserError,
        match=r"beam_size.* is not a setting of .*; its settings are max_input_length, batch_size, window, ref",
    ):
        run.evaluate(["the cat"], ["animal"], beam_size=1)
    with pytest.raises(UserError, match="classify takes a list of lines, not a string"):
        run.classify("the cat")
    with pytest.raises(UserError, match="the label 'plant' is none of the classes of the train split"):
        run.evaluate(["a rose"], ["plant"])
    with pytest.raises(UserError, match="there are no lines to evaluate; give at least one"):
        run.evaluate([], [])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__num_classes": 2}, r"num_classes is 2, and the train split has 3 classes \(animal, .*num_classes=3"),
        ({"data__text_column": 3}, "text_column is 3"),
        ({"loss_chunks": 2}, "config.loss_chunks is 2; it must be 1 where texts are classified"),
        ({"data__bpe_dropout": 0.1}, "config.data.bpe_dropout is 0.1; it must be 0 where texts are classified"),
        ({"r_drop": 5.0}, "config.r_drop is 5.0; it must be 0 where texts are classified"),
        ({"data__batching": "packed"}, "config.data.batching is 'packed'; it must be 'bucketed' where"),
        ({"model__positions": "learned", "model__max_length": 64}, "max_length is 64; it must be at least 128"),
        (
            {"model__positions": "learned", "model__max_length": 130, "decode__max_input_length": 130}
            | {"data__length_multiple_of": 8},
            "max_length is 130; it must be at least 136",  # as multiples of 8
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_it_is(trained, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        train(config_for(trained[0], **overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_labels_that_train_does_not_have_are_refused(tmp_path):
    texts = write_texts(tmp_path)
    with (texts / "test.tsv").open("a") as file:
        file.write("-\tplant\ta rose\n")
    with pytest.raises(UserError, match="the label 'plant' is none of the classes of the train split"):
        train(config_for(texts), tmp_path / "run")
    (texts / "train.tsv").write_text("".join(f"-\tone\ttext {i}\n" for i in range(50)))
    with pytest.raises(UserError, match="all texts of the train split are of one class, one"):
        train(config_for(texts), tmp_path / "run")


# The loss


def test_an_empty_row_weighs_nothing_and_micro_batches_add_up(run):
    tokens = run.tokenizer.encode(["the cat", "here is red", "six", "a dog"])
    source = np.zeros((6, 12), np.int32)
    target = np.zeros((6, 12), np.int32)
    for row, ids in enumerate(tokens):
        source[row, : len(ids) + 1] = [*ids, END_ID]
        target[row, :2] = [NUM_SPECIAL + row % 3, END_ID]
    loss_fn = jax.jit(classification_loss(run.model, 0.1), static_argnums=2)
    sums, counts = loss_fn(run.params, {"source": source, "target": target}, None)
    assert set(map(float, counts.values())) == {4}
    halves = [loss_fn(run.params, {"source": source[i::2], "target": target[i::2]}, None)[0] for i in (0, 1)]
    for name, value in sums.items():
        assert float(value) == pytest.approx(sum(float(half[name]) for half in halves), rel=1e-4)
    assert isinstance(run.model, Classifier)


class Table(nn.Module):
    """Has a parameter for every logit."""

    @nn.compact
    def __call__(self, source):
        return self.param("logits", nn.initializers.zeros, (5, 4))


def test_smoothing_over_classes_leaves_none_out():
    logits = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    target = np.array([0, 1, 2, 3, 0])
    q = 0.9 * np.eye(4)[target] + 0.1 / 4

    def plainly(logits):
        return -jnp.sum(q * jax.nn.log_softmax(logits))

    def ours(logits):
        batch = {"source": target[:, None], "target": NUM_SPECIAL + target[:, None]}
        return classification_loss(Table(), 0.1)({"logits": logits}, batch, None)[0]["loss"]

    assert float(ours(logits)) == pytest.approx(float(plainly(logits)), rel=1e-5)
    np.testing.assert_allclose(jax.grad(ours)(logits), jax.grad(plainly)(logits), atol=1e-5)


def test_many_classes_are_told_in_short():
    assert str(Classes([f"c{i:02}" for i in range(30)])).endswith("c19 and 10 more")


# From the shell


def test_lines_become_labels_with_their_probabilities(run, trained):
    texts, _ = run.split("test")
    given = "".join(f"{text}\n" for text in texts[:5]) + "\n"
    result = succeeds("classify", f"--workdir={trained[1]}", "--probabilities", given=given)
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert [line[0] for line in lines] == run.classify([*texts[:5], ""])
    expected = run.probabilities(texts[:1])[0]
    assert lines[0][1:] == [f"{name} {p:.4f}" for name, p in zip(run.classes.names, expected, strict=True)]
    assert "6 lines in" in result.stderr
    alone = succeeds("classify", f"--workdir={trained[1]}", given=given)
    assert alone.stdout.splitlines() == [line[0] for line in lines]


def test_a_classifier_that_has_diverged_predicts_nothing(run):
    diverged = dataclasses.replace(run, params=jax.tree.map(lambda leaf: leaf * jnp.nan, run.params))
    with pytest.raises(UserError, match="no class has a probability: the model's parameters are not finite"):
        diverged.classify(["a line"])


def test_a_split_is_measured_and_drawn(trained, run, tmp_path):
    picture = tmp_path / "confusion.svg"
    evaluate = "evaluate", f"--workdir={trained[1]}"
    result = succeeds(*evaluate, f"--confusion={picture}")
    report = json.loads(result.stdout)
    assert report["accuracy"] == pytest.approx(trained[2]["test"].scalars["accuracy"])
    assert list(report["classes"]) == ["animal", "colour", "number"]
    wanted = run.evaluate(*run.split("test"))
    assert report["confusion"] == wanted.confusion.tolist() != wanted.confusion.T.tolist()
    for name, values in (("precision", wanted.precision), ("recall", wanted.recall), ("texts", wanted.support)):
        assert [of[name] for of in report["classes"].values()] == values.tolist()
    assert "macro-F1:" in result.stderr
    assert "<svg" in picture.read_text()
    for file, message in (("a.jpeg", "must end in .png, .svg, .pdf"), ("no/a.png", "No such file")):
        assert message in refused("evaluate", "--workdir=/nowhere", f"--confusion={tmp_path / file}")
    for flag in ("--lowercase", f"--translations={tmp_path / 'out'}"):
        message = refused(*evaluate, flag)
        assert f"{flag.partition('=')[0]} has no effect with " in message
        assert ", which classifies" in message
    message = refused("classify", f"--workdir={tmp_path}")
    assert "holds no run" in message
