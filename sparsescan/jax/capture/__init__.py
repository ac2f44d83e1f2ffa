"""Bodies of loops of JAX, read as cells: what waits for the state, and what runs around it."""
