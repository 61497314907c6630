"""All commands under one name: transformer-flax COMMAND [--FLAG=VALUE ...], or python -m transformer_flax COMMAND."""

import runpy
import sys

import transformer_flax
from transformer_flax.errors import did_you_mean

COMMANDS = {
    "fetch": "download a text to train on",
    "train": "train a model",
    "translate": "translate lines of text with a trained model",
    "evaluate": "score a trained model on a split or on text files",
    "classify": "classify lines of text",
    "align": "align words by cross-attention",
    "sweep": "train rows of table 3 or other variants, with several seeds, and report",
    "cost": "parameters, FLOPs, memory and time of a config",
    "export": "write a trained model into one folder, as safetensors or for CTranslate2",
    "vectors": "train word vectors, look up neighbours, draw them",
}
USAGE = "usage: transformer-flax COMMAND [--FLAG=VALUE ...]\n\n" + "\n".join(
    f"  {name:<10} {what}" for name, what in {**COMMANDS, "--version": "print the version"}.items()
)


def main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"transformer_flax.{command}", run_name="__main__", alter_sys=True)
    elif command == "--version":
        print(transformer_flax.__version__)
    elif command in ("-h", "--help", "help"):
        print(f"{USAGE}\n\ntransformer-flax COMMAND --help lists the flags of a command.")
    else:
        hint = did_you_mean(command, COMMANDS)
        print(f"error: there is no command {command!r}{hint and f'; {hint}'}\n\n{USAGE}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
