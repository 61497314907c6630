"""Sweeps of runs that classify: accuracy where translators have BLEU."""

import dataclasses

import flax.linen as nn
import pytest
from ml_collections import ConfigDict

from configs import classifier
from tests.ablation.made import SESSION, result
from transformer_flax.ablation import figures, report, variants
from transformer_flax.ablation.comparison import ACCURACY, LOG_PERPLEXITY_OF_TEXTS, compare
from transformer_flax.ablation.results import RESULTS, Journal, read
from transformer_flax.ablation.trials import TrialFactory, measure
from transformer_flax.model import registry
from transformer_flax.model.config import ModelConfig
from transformer_flax.training.config_fields import flatten

ACCURACIES = {"mean": 0.8, "max": 0.9, "attention": 0.85}


def classified(pooling: str, seed: int):
    """A finished run of a sweep over poolings, whose base is "mean"."""
    scores = {"perplexity": 1.5, "accuracy": ACCURACIES[pooling] + seed / 100, "macro_f1": 0.7}
    made = result(f"base model.pooling={pooling}", seed, row="base", signature="")
    return dataclasses.replace(
        made,
        changes={} if pooling == "mean" else {"model.pooling": pooling},
        scores={"valid": scores, "test": scores},
        curve=[
            scores | {"step": step, "seconds": 1.0, "accuracy": scores["accuracy"] * step / 200} for step in (100, 200)
        ],
    )


def test_the_best_of_a_run_is_its_accuracy():
    lines = [
        {"step": step, "seconds": 1.0, "valid/perplexity": 1.5, "valid/accuracy": accuracy, "valid/macro_f1": 0.5}
        for step, accuracy in ((10, 0.875), (20, 0.75))
    ]
    progress = measure(lines, 20)
    assert progress.scores["valid"]["accuracy"] == 0.75
    first = {"step": 10, "seconds": 1.0, "perplexity": 1.5, "accuracy": 0.875, "macro_f1": 0.5}
    assert progress.curve[0] == first
    assert str(progress) == "accuracy 87.5%"


def test_poolings_are_compared_by_accuracy_and_a_report_says_so(tmp_path):
    config = classifier.get_config()
    head = {"name": "trec", "config": flatten(config.to_dict()), **SESSION}
    journal = Journal(tmp_path / RESULTS, head)
    for pooling in ACCURACIES:
        for seed in (0, 1, 2):
            journal.append(classified(pooling, seed))
    head, results = read(tmp_path / RESULTS)
    assert results == list(journal.results.values())

    comparison = compare(results, head["config"])
    assert comparison.measures == (LOG_PERPLEXITY_OF_TEXTS, ACCURACY)
    assert comparison.base.variant == "base model.pooling=mean"
    others = [entry for entry in comparison.entries if entry is not comparison.base]
    effects = {entry.variant.split("=")[1]: entry.effects[ACCURACY].ours.value for entry in others}
    assert effects == pytest.approx({"max": 10, "attention": 5})
    text = report.as_markdown(comparison, head, ())
    assert "| variant | perplexity | accuracy, % |" in text
    assert "81.0 [" in text
    assert "BLEU" not in text.split("The whole config")[0]
    few = {"eval.sentences": 10, "eval.final_sentences": 20}  # of which accuracy is not
    assert "sentences" not in report.as_markdown(compare(results, head["config"] | few), head, ()).split("##")[1]
    assert figures.curves(comparison, ACCURACY)


def test_perplexities_of_classes_compare_whatever_the_pieces_are():
    config = flatten(classifier.get_config().to_dict())
    changes = {"data.vocab_size": 9}
    pieces = dataclasses.replace(classified("mean", 0), variant="base data.vocab_size=9", changes=changes)
    comparison = compare([classified("mean", 0), pieces], config)
    head = {"name": "trec", "config": config, "sessions": [SESSION]}
    assert "Only their scores" not in report.as_markdown(comparison, head, ())


def test_the_grid_has_the_fields_of_a_classifier(tmp_path):
    base = classifier.get_config()
    chosen = variants.make_variants(base, "base", axes=["model.pooling=mean,max", "model.num_layers=1"])
    runs = TrialFactory("configs/classifier.py", base, {}, tmp_path).trials(chosen, seeds=range(1))
    assert [run.variant.changes for run in runs] == [
        {"model.num_layers": 1},
        {"model.num_layers": 1, "model.pooling": "max"},
    ]
    failure = runs[0].failure("it is a test")
    assert failure.signature == ""
    assert failure.parameters > 500_000


def test_another_kind_of_classifier_has_no_bleu_either(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OtherConfig(ModelConfig):
        num_classes: int

    class Other(nn.Module):
        config: OtherConfig

        @nn.compact
        def __call__(self, source):
            return nn.Dense(self.config.num_classes)(source.astype(float))

    monkeypatch.setitem(registry.KINDS, "other", registry.Kind(OtherConfig, Other, attention={}, classifies=True))
    base = classifier.get_config()
    base.model = ConfigDict({"kind": "other", "num_layers": 1, "d_model": 4, "dropout": 0.0, "dtype": "float32"})
    base.model.num_classes = 2
    [run] = TrialFactory("configs/other.py", base, {}, tmp_path).trials(
        variants.make_variants(base, "base"), seeds=range(1)
    )
    assert run.failure("it is a test").signature == ""
