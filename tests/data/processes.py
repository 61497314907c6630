"""Processes of their own, some without TensorFlow."""

import json
import os
import subprocess
import sys

from tests.conftest import ROOT

READ_WITHOUT_TENSORFLOW = """
import importlib.util, json, sys


class NoTensorFlow:  # as if it were not installed, even where it is
    find_installed = importlib.util.find_spec

    def find_spec(self, name, *_):
        if name.split(".")[0] == "tensorflow":
            raise ModuleNotFoundError(name)

    def find_others(name, package=None):
        return None if name == "tensorflow" else NoTensorFlow.find_installed(name, package)


sys.meta_path.insert(0, NoTensorFlow())
importlib.util.find_spec = NoTensorFlow.find_others
from tests.data.make import data_config
from transformer_flax.data.sources import load_pairs

_, name, target_language = sys.argv
config = data_config(source="tfds", name=name, target_language=target_language)
pairs = {split: load_pairs(config, split) for split in ("train", "valid", "test")}
json.dump({split: [read.read(range(len(read))), read.fingerprint] for split, read in pairs.items()}, sys.stdout)
"""


def run(script, *arguments, **environment) -> str:
    """Runs the script in a process of its own; returns what it prints."""
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def read_without_tensorflow(folder, name, target_language="de") -> dict[str, list]:
    """The pairs and the fingerprint of each split as another process reads them, without TensorFlow."""
    return json.loads(run(READ_WITHOUT_TENSORFLOW, name, target_language, TFDS_DATA_DIR=str(folder)))
