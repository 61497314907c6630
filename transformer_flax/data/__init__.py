"""Text in, batches of integers out. Knows nothing of the model."""
