"""Bodies of loops of JAX: readers of their equations, and what runs them."""
