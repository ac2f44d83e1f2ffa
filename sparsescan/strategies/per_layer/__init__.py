"""A configuration for every layer (Jia, Lin, Qi and Aiken, DeePa, 2018)."""
