"""Integrated model, batch and domain parallelism (Gholami et al., SPAA 2018).

Its grids are configurations of layers, which cost and train as those of ``per_layer``.
"""
