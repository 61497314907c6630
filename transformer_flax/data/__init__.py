"""Turns text into batches of token ids. Does not import the model."""
