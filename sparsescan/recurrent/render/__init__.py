"""Renderers: from the graph of a step to source text, a target each."""
