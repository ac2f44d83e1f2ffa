"""Training steps of networks of layers: all samples at once, forward and backward."""
