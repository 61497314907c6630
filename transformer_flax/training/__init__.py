"""From a config to a trained model in a working directory."""
