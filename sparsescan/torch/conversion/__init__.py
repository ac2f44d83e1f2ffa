"""What a model has, and modules that take the place of its own."""
