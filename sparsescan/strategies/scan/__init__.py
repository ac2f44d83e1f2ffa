"""The scan over parts of the chain (Wang, Bai and Pekhimenko, BPPSA, MLSys 2020)."""
