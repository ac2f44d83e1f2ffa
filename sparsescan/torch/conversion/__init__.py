"""Modules that replace the modules of a model."""
