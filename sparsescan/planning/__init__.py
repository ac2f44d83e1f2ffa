"""Which schedule, and which form of each product, takes least."""
