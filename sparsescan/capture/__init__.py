"""Bodies of loops, read as cells: what waits for the state, and what runs around it."""
