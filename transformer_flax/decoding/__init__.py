"""From a model to text, and from text to a score."""
