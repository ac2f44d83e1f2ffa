"""JAX computes with float64."""

from jax_doubles import double as double
