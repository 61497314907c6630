"""Sends metrics to Weights & Biases."""

import contextlib
import json
import uuid
from collections.abc import Callable, Generator
from typing import Any

from ml_collections import ConfigDict

from transformer_flax.errors import UserError
from transformer_flax.files import read_json, write_whole
from transformer_flax.training.multihost import is_first
from transformer_flax.training.run_directory import RunDirectory


def require_wandb() -> Any:
    """Imports wandb."""
    try:
        import wandb

        wandb.init  # noqa: B018 (a folder wandb/, which offline runs make, can be imported too)
    except Exception as error:
        raise UserError(
            f"config.log.wandb needs wandb ({error}): pip install wandb, or leave the field empty"
        ) from error
    return wandb


class WandbRun:
    """A run in Weights & Biases. A resumed run keeps its id, which is stored in `wandb.json`.

    `config.log.wandb` names the project; if it is empty, nothing is sent. Failures never end the training. The first
    failure is printed, and then nothing more is sent.
    """

    def __init__(self, config: ConfigDict, directory: RunDirectory, say: Callable[[str], None]):
        self._say, self._run = say, None
        if not (config.log.wandb and is_first()):
            return
        with self._harmless():
            if not directory.wandb_file.exists():
                write_whole(directory.wandb_file, json.dumps({"id": uuid.uuid4().hex}))
            wandb = require_wandb()
            self._run = wandb.init(
                project=config.log.wandb,
                id=read_json(directory.wandb_file)["id"],
                name=str(directory.path),
                config=config.to_dict(),
                resume="allow",
                reinit="create_new",  # other seeds may have runs in this process
                # The terminal belongs to the progress bar. A lost connection must not keep a finished run waiting.
                settings=wandb.Settings(console="off", finish_timeout=300),
            )
            # A resumed run repeats steps. Weights & Biases would refuse repeated values of its own step.
            self._run.define_metric("*", step_metric="step")

    def send(self, line: dict[str, Any]) -> None:
        """Sends a line of `metrics.jsonl`."""
        with self._harmless():
            if self._run:
                self._run.log(line)

    def close(self, *, failed: bool) -> None:
        """Waits until everything is sent, for at most five minutes. `wandb sync` sends the rest."""
        with self._harmless():
            if self._run:
                self._run.finish(exit_code=int(failed))

    @contextlib.contextmanager
    def _harmless(self) -> Generator[None]:
        try:
            yield
        except Exception as error:
            self._run = None
            self._say(f"WARNING: Weights & Biases: {error}; the run continues without it")
