"""Flags as people type them. The process is that of the tests, so a case costs milliseconds."""

import sys

import pytest
from absl import flags

from configs import base
from transformer_flax.ablation.variants import make_variants
from transformer_flax.arguments import OTHER_NAMES, SeedsParser, arrange, define_config, load_config, parse
from transformer_flax.errors import UserError
from transformer_flax.training.config_fields import flatten


@pytest.fixture
def command(monkeypatch):
    """Parses the arguments of a command that has --config, and returns the config."""

    def command(*arguments, default="numbers.py"):
        monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        config = define_config(default)
        flags.DEFINE_integer("beam_size", 4, "", flag_values=flags.FLAGS, lower_bound=1)
        flags.DEFINE_list("heads", None, "", flag_values=flags.FLAGS)
        flags.DEFINE(SeedsParser(), "seeds", None, "", flag_values=flags.FLAGS)
        flags.DEFINE_enum("split", "test", ["valid", "test"], "split of the data", flag_values=flags.FLAGS)
        flags.DEFINE_bool("profile", False, "", flag_values=flags.FLAGS)
        parse(sys.argv)
        return config()

    return command


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        # A field without its place
        ("--steps=10", "unknown flag --steps; did you mean --config.steps?"),
        ("--stpes=10", "unknown flag --stpes; did you mean --config.steps?"),
        ("--model.num_heads=2", "unknown flag --model.num_heads; did you mean --config.model.num_heads?"),
        ("--num_heads=2", "unknown flag --num_heads; did you mean --config.model.num_heads?"),
        ("--seed=2", "unknown flag --seed; did you mean --config.seed or --config.data.seed?"),
        ("--beam=2", "unknown flag --beam; did you mean --beam_size or --config.decode.beam_size?"),
        ("--xyz=2", "unknown flag --xyz; see --help"),
        # A field by another name
        ("--config.model.num_head=3", "--config.model.num_head=3: this config has no field 'model.num_head'; "
         "did you mean --config.model.num_heads?"),
        ("--config.optimzer.factor=3", "--config.optimzer.factor=3: this config has no field 'optimzer.factor'; "
         "did you mean --config.optimizer.factor?"),
        ("--config.modl.num_head=3", "no field 'modl.num_head'; did you mean --config.model.num_heads?"),
        ("-config.modl.num_head=3", "no field 'modl.num_head'; did you mean --config.model.num_heads?"),
        ("--config.lr=1", "--config.lr=1: this config has no field 'lr'; set --config.optimizer.factor, which multi"),
        ("--config.optimizer.lr=1", "this config has no field 'optimizer.lr'; set --config.optimizer.factor, which m"),
        ("--learning_rate=1", "unknown flag --learning_rate; set --config.optimizer.factor, which multiplies the pa"),
        ("--batch_size=64", "unknown flag --batch_size; set --config.data.tokens_per_batch, the size of a training b"),
        ("--epochs=3", "unknown flag --epochs; set --config.steps, the length of training"),
        ("--batch-size=64", "unknown flag --batch-size; set --config.data.tokens_per_batch, the size of a training b"),
        ("--learning-rate=1", "unknown flag --learning-rate; set --config.optimizer.factor, which multiplies the pa"),
        ("--config.data.max_tokens=9", "no field 'data.max_tokens'; set --config.data.tokens_per_batch, the size"),
        ("--update-freq=4", "set --config.accumulation_steps, the micro-batches that a batch is divided into"),
        ("--max-epoch=9", "unknown flag --max-epoch; set --config.steps, the length of training"),
        ("--restore-file=x", "set --config.init_from, which starts a new run from the parameters of another"),
        ("--save-dir=x", "set --config.name, which names the run; --workdir=DIRECTORY sets its directory"),
        ("--lenpen=1", "set --config.decode.alpha, the exponent of the length penalty"),
        ("--activation-dropout=0.1", "set --config.model.ffn_dropout, which is inside the feed-forward network"),
        ("--fp16", "unknown flag --fp16; set --config.model.dtype, the type of the computation"),
        ("--config.eval.every_steps=9", "no field 'eval.every_steps'; did you mean --config.eval.every?"),
        ("--config.checkpoint.every_steps=9", "did you mean --config.checkpoint.every?"),
        ("--config.optimizer.steps=9", "did you mean --config.steps?"),
        ("--config.data.num_layers=9", "did you mean --config.model.num_layers?"),
        ("--config.decode.batch-size=4", "did you mean --config.decode.batch_size?"),
        ("--config.nope.field=3", "no field 'nope.field'; the config file, and those it imports, list its fields"),
        ("--config.steps.x=3", "--config.steps.x=3: this config has no field 'steps.x'; "),
        ("--config.=3", "--config.=3: this config has no field ''; "),
        ("--noconfig.eval.tests", "--noconfig.eval.tests: this config has no field 'eval.tests'; did you mean --conf"),
        # A value of another type
        ("--config.model.d_model=wide", "--config.model.d_model=wide: it must be an integer"),
        ("--config.model.d_model=a: b", "--config.model.d_model=a: b: it must be an integer"),
        ("--config.steps=1.5", "--config.steps=1.5: it must be an integer"),
        ("--config.model.dropout=", "--config.model.dropout=: it must be a number"),
        ("--config.eval.test=maybe", "--config.eval.test=maybe: it must be true or false"),
        ("--config.model=3", "--config.model=3: it must be a section; to set a field of it: --config.model.FIELD=V"),
        ("--noconfig.eval.test=1", "--noconfig.eval.test=1 does not take an argument"),
        ("--beam_size=0", "--beam_size=0: it must be a positive integer"),
        ("--beam_size=many", "--beam_size=many: it must be a positive integer"),
        *((f"--seeds={wrong}", f"--seeds={wrong}: it must be a number of seeds, at most 1,000, or a list of different")
          for wrong in ("0", "-2", "2,2", "1,-1", "1,,", "three", "1.0", "1234567890", "1,4294967296")),
        ("--split=dev", "--split=dev: it must be one of valid, test"),
        ("--split=dev", "--split=dev: it must be one of valid, test (split of the data)"),
        ("--profile=x", "--profile=x: it must be true or false"),
        ("--beam_size", "Missing value for flag --beam_size"),
        ("--config", "Missing value for flag --config"),
        # A config that cannot be loaded
        ("--config=configs/multi30.py", "there is no such file; did you mean 'configs/multi30k.py'?"),
        ("--config=configs/x.yaml", "configs/x.yaml cannot be loaded: there is no such file; there are configs/ba"),
        ("--config=README.md", "README.md: SyntaxError: "),
        ("--config=README.md", "; a config is a Python file, such as configs/numbers.py"),
        ("--config=configs/table3.py:A-h17", "there is no row 'A-h17'; did you mean 'A-h1'?"),
        ("--config=configs/numbers.py:A-h1", "takes no argument behind a colon"),
        # Languages
        ("--languages=german", "--languages=german: give the source and the target, as in de-en; set names with a hyp"),
        ("--languages=de-", "--languages=de-: give the source and the target, as in de-en; "),
        ("--languages=", "--languages=: give the source and the target, as in de-en; "),
        ("--languages=pt-br-en", "set names with a hyphen with --config.data.source_language and --config.data.targ"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_message_that_says_what_to_type(command, argument, message):
    with pytest.raises(UserError) as refusal:
        command(argument)
    said = str(refusal.value)
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["heads", "config.data.path", "config.model.dtype"])
def test_a_flag_does_not_take_the_next_one_for_its_value(command, name):
    with pytest.raises(UserError, match=rf"--{name} has no value before --beam_size=2; write --{name}=VALUE"):
        command(f"--{name}", "--beam_size=2")


def test_flags_that_need_no_value_and_values_with_a_hyphen_are_as_they_were(command):
    assert command("--config.eval.test", "--profile", "--config.data.path", "-", "--beam_size=2").data.path == "-"
    assert command("--config.data.path=--x", "--beam_size=2").data.path == "--x"


def test_other_kinds_of_configs_are_told_of_their_own_fields(command):
    with pytest.raises(UserError, match=r"no field 'model\.num_heads'; "):
        command("--config=configs/recurrent.py", "--config.model.num_heads=4")
    with pytest.raises(UserError, match=r"did you mean --config\.vectors\.learning_rate\?"):
        command("--learning_rate=1", default="vectors.py")
    with pytest.raises(UserError, match=r"no field 'steps'; the config file, and those it imports, list its fields"):
        command("--config.steps=20", default="vectors.py")
    with pytest.raises(UserError, match=r"no field 'model\.activation_dropout'; the config file, and those it imports"):
        command("--config=configs/recurrent.py", "--config.model.activation_dropout=0.1")


def test_other_names_are_of_fields_that_there_are():
    assert {field for field, _ in OTHER_NAMES.values()} <= flatten(base.get_config().to_dict()).keys()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config=configs/base.py", "--config.steps=3"],
        ["--config.steps=3", "--config=configs/base.py"],
        ["--config.steps", "3", "--config", "configs/base.py"],
        ["-config.steps=3", "-config=configs/numbers.py", "--beam_size=2", "--config=configs/base.py"],
    ],
    ids=" ".join,
)
def test_fields_override_the_config_wherever_it_stands(command, arguments):
    config = command(*arguments)
    assert (config.name, config.steps) == ("base", 3)


OLDER = """
from configs import {module}


def get_config():
    config = {module}.get_config()
    del config.{field}{others}
    config.{field} = 0
    return config
"""


def test_fields_that_a_file_lacks_can_be_set_and_fractions_where_it_has_a_whole_number(command, tmp_path):
    others = ", config.r_drop, config.model.neighbourhood"
    (tmp_path / "older.py").write_text(OLDER.format(module="base", field="model.dropout", others=others))
    set_here = "--config.r_drop=5.0", "--config.model.neighbourhood=8", "--config.model.dropout=0.2"
    config = command(f"--config={tmp_path}/older.py", *set_here)
    assert (config.r_drop, config.model.neighbourhood, config.model.dropout) == (5.0, 8, 0.2)
    [variant] = make_variants(load_config(f"{tmp_path}/older.py"), "D-drop0.2")
    assert variant.config.model.dropout == 0.2
    (tmp_path / "vectors.py").write_text(OLDER.format(module="vectors", field="vectors.subsample", others=""))
    config = command(f"--config={tmp_path}/vectors.py", "--config.vectors.subsample=0.001")
    assert config.vectors.subsample == 0.001


def test_without_a_config_there_is_the_default(command):
    assert command("--config.steps=3").name == "numbers"
    assert command(default="base.py").steps == 100_000


def test_what_is_behind_two_dashes_is_no_flag():
    arranged = arrange(["train.py", "a", "--", "--config=b", "--languages=c"], default="d")
    assert arranged == ["train.py", "--config=d", "a", "--", "--config=b", "--languages=c"]


def test_a_flagfile_may_hold_the_config_its_fields_and_the_languages(command, tmp_path):
    (tmp_path / "flags").write_text("--config=configs/copy.py\n--config.steps=7\n--languages=de-fr\n")
    config = command(f"--flagfile={tmp_path / 'flags'}", "--beam_size=2")
    assert (config.name, config.steps, config.data.target_language) == ("copy", 7, "fr")
    assert flags.FLAGS["beam_size"].value == 2


def test_a_path_may_begin_with_the_home_directory(command, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert command("--config.data.path=~/texts").data.path == "/home/ada/texts"
    for other in ("texts~", "~", "x=~/y"):
        assert command(f"--config.data.path={other}").data.path == other


def test_languages_are_the_two_fields_and_nothing_else(command):
    config = command("--languages=de-fr")
    assert (config.data.source_language, config.data.target_language) == ("de", "fr")
    separately = command("--config.data.source_language=de", "--config.data.target_language=fr")
    assert config.to_dict() == separately.to_dict()
    assert flags.FLAGS["config"].override_values.keys() == {"data.source_language", "data.target_language"}


def test_a_field_overrides_the_languages(command):
    config = command("--config.data.target_language=fr", "--languages=de-en")
    assert (config.data.source_language, config.data.target_language) == ("de", "fr")


def test_seeds_are_listed_or_counted_from_0():
    assert SeedsParser().parse("3") == [0, 1, 2]
    assert SeedsParser().parse("1") == [0]
    assert SeedsParser().parse("4,2") == [4, 2]
    assert SeedsParser().parse("101,") == [101]
