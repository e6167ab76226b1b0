"""The lazy tensor, and what every function of lazy tensors does with its arguments."""
