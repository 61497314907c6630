"""What the run in a working directory is, checked: whoever wrote it need not be trusted, nor be of this version."""

from ml_collections import ConfigDict

from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.model.kinds import Config
from transformer_flax.training.fields import require_fields
from transformer_flax.training.prepare import model_config, require_run
from transformer_flax.training.workdir import Workdir


def load_described(place: Workdir) -> tuple[ConfigDict, Tokenizer, Config]:
    """What a run is, checked: its config, its tokenizer and its model, without parameters.

    Raises:
      UserError: there is no run, or one that cannot be read.
    """
    config, tokenizer = place.load_config(), place.load_tokenizer()
    try:
        require_run(config)
        require_fields(config, saved=True)
        model = model_config(config, tokenizer.vocab_size)
        for name in ("eval.final_average", "checkpoint.every"):
            section, field = name.split(".")
            if config[section][field] < 1:
                raise UserError(f"config.{name} is {config[section][field]}; it must be at least 1")
    except UserError as error:
        raise UserError(f"{place.config_file}: {error}") from error
    return config, tokenizer, model
