"""Steps of loops of PyTorch: how they are traced and kept, read as equations, and run."""
