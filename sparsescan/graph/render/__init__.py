"""Renderers: expressions as source text, a target each."""
