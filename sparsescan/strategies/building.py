"""Networks of all kinds as the graphs that strategies read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ..errors import InputError
from .graph import Graph
from .networks import build as build_named
from .networks import from_chain, graph_of


def build(network: Any, input_shape: Sequence[int] | None = None) -> Graph:
    """Return the graph of a network, with layers, parameters and multiply-adds.

    Parameters
    ----------
    network : str, Sequential, torch.nn.Module or sequence of Pattern
        One of these:

        - the name of a network that is built in: ``"lenet5"``, ``"alexnet"``, ``"alexnet-owt"``,
          ``"vgg11"``, ``"vgg16"``, ``"resnet-N"``, ``"inception-v3"``, ``"rnn:T"`` or ``"gru:T"``,
          for `N` layers or `T` time steps (:func:`.networks.build` says where they are from);
        - a :class:`sparsescan.jacobians.Sequential`, whose operators become layers; a residual
          block becomes the layers that it goes around, those of its shortcut, and a sum;
        - a module of PyTorch with one input and one output, which `torch.fx` traces: convolutions,
          poolings, linear layers, normalisations, activations, sums and concatenations of channels,
          under the names of its modules;
        - the patterns of a chain, from the last Jacobian to the first: a linear layer for each, or
          an elementwise one where the pattern is diagonal. Each entry of a linear layer counts as a
          parameter, since a chain does not tell their number.
    input_shape : sequence of int, optional
        The shape of one sample, which a module of PyTorch needs.

    Returns
    -------
    Graph
        It is printed by name, layers and weights; ``graph.layers`` has the layers.

    Raises
    ------
    InputError
        If there is no network of this name, or a layer cannot be read.
    InputTypeError
        If `network` is no network.

    Examples
    --------
    >>> from sparsescan.strategies import build
    >>> build("lenet5")
    Graph('lenet5', 13 layers, 61706 weights)
    """
    if isinstance(network, str):
        return build_named(network)
    if isinstance(network, list | tuple):
        return from_chain(network)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(network, torch.nn.Module):
        from .pytorch import from_torch

        if input_shape is None:
            raise InputError(
                f"network is the module {type(network).__name__}, whose input_shape is None; "
                "expected the shape of one sample"
            )
        return from_torch(network, input_shape)
    return graph_of(network)
