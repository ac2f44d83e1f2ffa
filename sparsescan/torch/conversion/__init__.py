"""Modules that take the place of those of a model."""
