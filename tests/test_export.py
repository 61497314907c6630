"""A trained model is handed on: as one folder that is restored like a run, and to CTranslate2."""

import dataclasses
import json
import shutil

import ctranslate2
import jax
import numpy as np
import pytest
import tokenizers

from tests.commands.process import refused, succeeds
from transformer_flax.errors import UserError
from transformer_flax.run import restore
from transformer_flax.training.loop import train
from transformer_flax.training.trained_model import checksum


@pytest.fixture(scope="module")
def run(finished):
    return restore(finished)


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory):
    output = tmp_path_factory.mktemp("export") / "model"
    told = succeeds("export", f"--workdir={finished}", output).stderr
    assert f"{output}: config.json, model.safetensors, tokenizer.json; " in told
    return output


def test_an_exported_model_is_restored_like_the_run(run, exported):
    copy = restore(exported)
    jax.tree.map(np.testing.assert_array_equal, copy.params, run.params)
    assert (copy.params_from, copy.config, copy.fingerprints) == (run.params_from, run.config, run.fingerprints)
    sources, references = run.split("test")
    ours, theirs = (dataclasses.asdict(each.evaluate(sources, references)) for each in (run, copy))
    for measured in (ours, theirs):
        del measured["sentences_per_second"], measured["compilations"]  # the second finds the first's programs
    assert ours == theirs


def test_it_is_no_run_to_train_on_and_has_one_set_of_parameters(run, exported):
    for chosen in ({"average": 1}, {"steps": 200}):
        with pytest.raises(UserError, match="exported model with one set of parameters"):
            restore(exported, **chosen)
    with pytest.raises(UserError, match=r"exported model, which cannot be resumed; .* --config\.init_from="):
        train(run.config, exported)
    with pytest.raises(UserError, match="is there already"):
        run.export(exported)
    assert "is there already" in refused("export", f"--workdir={exported}", exported)


def test_a_damaged_file_or_one_of_another_model_is_named(exported, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(exported, model)
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        restore(model)
    (model / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        restore(model)
    shutil.copy(exported / "model.safetensors", model)
    config = json.loads((model / "config.json").read_text())
    config["config"]["model"]["d_ff"] += 1
    del config["crc32"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"decoder_0.feed_forward.w_1.bias is \(16,\) there, and \(17,\) in the config"):
        restore(model)


def test_a_checksum_is_of_names_too_and_stays_the_same():
    # Otherwise a later version would refuse the exported models of this one, and runs that started from them.
    values = np.arange(3, dtype=np.float32)
    assert checksum({"layer": {"kernel": values}}) == 4258839395
    assert checksum({"a": values, "b": 2 * values}) != checksum({"a": 2 * values, "b": values})


def test_ctranslate2_translates_like_the_run(run, tmp_path):
    run.export(tmp_path / "model", "ctranslate2")
    with pytest.raises(UserError, match=r"is not the config of a run.* models for CTranslate2 by its library"):
        restore(tmp_path / "model")
    sources = [line for line in run.split("test")[0] if line]
    extra = run.config.decode.max_extra_length
    ours = run.translate(sources, beam_size=1)
    translator = ctranslate2.Translator(str(tmp_path / "model"), compute_type="float32", intra_threads=1)
    pieces = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    inputs = [pieces.encode(f" {line}").tokens for line in sources]
    theirs = []
    for tokens in inputs:
        [result] = translator.translate_batch([tokens], beam_size=1, max_decoding_length=len(tokens) + extra)
        ids = [pieces.token_to_id(token) for token in result.hypotheses[0]]
        theirs.append(pieces.decode(ids).removeprefix(" "))
    assert theirs == ours
    assert len(set(theirs)) > len(theirs) / 2


def test_what_cannot_be_exported_is_refused(run, tmp_path):
    with pytest.raises(UserError, match="an ensemble cannot be exported"):
        run.ensemble(run).export(tmp_path / "model")
    with pytest.raises(UserError, match="must be safetensors or ctranslate2"):
        run.export(tmp_path / "model", "onnx")
    assert not any(tmp_path.iterdir())
    assert "name one folder" in refused("export", "--workdir=runs/none")
