"""Training: a config in, a trained model in a working directory out."""
