"""Integrated model, batch and domain parallelism (Gholami et al., SPAA 2018).

Its grids are configurations of layers: they cost and train by the modules ``costs`` and ``train``
of ``per_layer``, so that this folder has a ``predict`` alone.
"""
