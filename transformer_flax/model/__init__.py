"""The Transformer: arrays in, arrays out. Knows nothing of text, files or runs."""
