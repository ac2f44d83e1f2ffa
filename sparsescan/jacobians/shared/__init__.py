"""The base class of layers, and matrices of one structure."""
