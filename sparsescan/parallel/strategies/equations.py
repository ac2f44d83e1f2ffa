"""What integrated parallelism sends: equations 3 to 9 of Gholami et al. (SPAA 2018), by term.

Of layer ``i``, which multiplies by weights, ``|W_i|`` are its parameters, ``d_{i-1}`` the entries
that it reads and ``d_i`` those that the next such layer reads: behind activations and pooling,
which the owner of some channels applies to them alone. A mini-batch has ``B`` samples, and
``P = P_r × P_c`` workers share it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ...errors import InputError
from ..network import Network
from .graph import Graph

__all__ = [
    "MIXING",
    "Product",
    "Volume",
    "all_gather",
    "all_reduce",
    "batch_equation",
    "combined_equation",
    "crossover",
    "domain_equation",
    "halo",
    "integrated_equation",
    "model_equation",
    "products",
    "redistribution",
]

#: Kinds of layers whose every output reads all channels of the input, through weights.
MIXING = ("conv", "linear", "cell")


class Volume(NamedTuple):
    """What a worker sends: messages one after the other, and numbers."""

    messages: float = 0.0
    words: float = 0.0

    def __add__(self, other: Volume) -> Volume:  # type: ignore[override]
        return Volume(self.messages + other.messages, self.words + other.words)

    def __mul__(self, factor: float) -> Volume:  # type: ignore[override]
        return Volume(self.messages * factor, self.words * factor)

    def time(self, network: Network, itemsize: int = 4) -> float:
        """``α·messages + β·words·itemsize``, in nanoseconds."""
        each = network.inverse_bandwidth * itemsize
        return network.latency * self.messages + each * self.words


class Product(NamedTuple):
    """A layer that multiplies by weights, as the equations see it.

    Attributes
    ----------
    name : str
        Of the layer.
    weights : int
        ``|W_i|``.
    read, made : int
        ``d_{i-1}`` and ``d_i``.
    input_row, output_row : int
        ``X_W X_C`` and ``Y_W Y_C``: entries of a row of an image; 0 if there are no images.
    kernel : tuple of int
        ``(k_h, k_w)``.
    output_rows : int
        ``Y_H``.
    """

    name: str
    weights: int
    read: int
    made: int
    input_row: int = 0
    output_row: int = 0
    kernel: tuple[int, int] = (1, 1)
    output_rows: int = 1


def products(graph: Graph) -> list[Product]:
    """The layers of a chain that multiply by weights.

    Raises
    ------
    InputError
        If the graph is no chain.
    """
    if not graph.is_chain:
        raise InputError(f"{graph!r} is no chain; expected layers one after the other")
    layers = graph.layers
    numbers = [k for k, layer in enumerate(layers) if layer.kind in MIXING]
    found = []
    for k, after in zip(numbers, [*numbers[1:], len(layers)], strict=True):
        layer, shape = layers[k], graph.input_shape(k)
        row = layer.shape[0] * layer.shape[2] if layer.kind == "conv" else 0
        found.append(
            Product(
                layer.name,
                layer.weights,
                math.prod(shape),
                layers[after - 1].size,
                shape[0] * shape[2] if row else 0,
                row,
                layer.kernel,
                layer.shape[1] if row else 1,
            )
        )
    return found


def all_gather(workers: int, words: float) -> Volume:
    """``α⌈log P⌉ + β n (P - 1)/P``: of `words` numbers in all; an all-reduce is twice that."""
    return Volume((workers - 1).bit_length(), words * (workers - 1) / workers)


def all_reduce(workers: int, words: float) -> Volume:
    """``2 (α⌈log P⌉ + β n (P - 1)/P)``."""
    return all_gather(workers, words) * 2


def halo(row: int, size: int, samples: float) -> Volume:
    """``α + β B X_W X_C ⌊k/2⌋``: to one neighbour; nothing for a kernel of 1."""
    rows = size // 2
    return Volume(1, samples * row * rows) if rows else Volume()


def model_equation(layers: Sequence[Product], workers: int, batch: int) -> Volume:
    """Pure model parallelism, equation 3.

    ``Σ_{i=1}^L (α⌈log P⌉ + β B (P-1)/P d_i) + 2 Σ_{i=2}^L (α⌈log P⌉ + β B (P-1)/P d_{i-1})``: the
    all-gather of activations, and the all-reduce of their gradients.
    """
    return integrated_equation(layers, workers, 1, batch)


def batch_equation(layers: Sequence[Product], workers: int) -> Volume:
    """Pure batch parallelism, equation 4: ``2 Σ (α⌈log P⌉ + β (P-1)/P |W_i|)``."""
    return _sum([all_reduce(workers, layer.weights) for layer in layers])


def crossover(layer: Product) -> float:
    """Equation 5: the batch up to which model parallelism sends less than batch parallelism.

    ``2 |W_i| / (3 d_i) = 2 k_h k_w X_C / (3 Y_H Y_W)``, where `layer` is a convolution without a
    bias, and ``d_i`` are all its outputs.
    """
    return 2 * layer.weights / (3 * layer.output_row * layer.output_rows)


def redistribution(rows: int, words: float, samples: float) -> Volume:
    """Equation 6, batch to model: ``α⌈log P⌉ + β B (P-1)/P d_i``; on a grid over ``P_r``."""
    return all_gather(rows, samples * words)


def domain_equation(layers: Sequence[Product], workers: int, batch: int) -> Volume:
    """Pure domain parallelism, equation 7.

    ``Σ (α + β B X_W X_C ⌊k_h/2⌋) + Σ (α + β B Y_W Y_C ⌊k_w/2⌋) + 2 Σ (α⌈log P⌉ + β (P-1)/P |W|)``:
    the halos of inputs and of gradients of outputs, and the all-reduce of weights.
    """
    return combined_equation(layers, workers, 1, batch, range(len(layers)))


def integrated_equation(layers: Sequence[Product], rows: int, columns: int, batch: int) -> Volume:
    """Model and batch parallelism on a ``P_r × P_c`` grid, equation 8.

    ``Σ_{i=1}^L (α⌈log P_r⌉ + β B/P_c (P_r-1)/P_r d_i)
    + 2 Σ_{i=2}^L (α⌈log P_r⌉ + β B/P_c (P_r-1)/P_r d_{i-1})
    + 2 Σ (α⌈log P_c⌉ + β (P_c-1)/P_c |W_i|/P_r)``.
    """
    return combined_equation(layers, rows, columns, batch, ())


def combined_equation(
    layers: Sequence[Product], rows: int, columns: int, batch: int, domain: Collection[int]
) -> Volume:
    """Model, batch and domain parallelism, equation 9.

    That of equation 8 for the layers that are not in `domain`, and for those that are

    ``Σ (α + β B/P_c X_W X_C ⌊k_h/2⌋) + Σ (α + β B/P_c Y_W Y_C ⌊k_w/2⌋)
    + 2 Σ (α⌈log P⌉ + β (P-1)/P |W_i|)``.

    The redistribution from domain to model (equation 6) is not in it.
    """
    samples = batch / columns
    terms = []
    for i, layer in enumerate(layers):
        if i in domain:
            terms.append(halo(layer.input_row, layer.kernel[0], samples))
            terms.append(halo(layer.output_row, layer.kernel[1], samples))
            terms.append(all_reduce(rows * columns, layer.weights))
            continue
        terms.append(all_gather(rows, samples * layer.made))
        if i > 0:
            terms.append(all_reduce(rows, samples * layer.read))
        terms.append(all_reduce(columns, layer.weights / rows))
    return _sum(terms)


def _sum(terms: Sequence[Volume]) -> Volume:
    return Volume(sum(term.messages for term in terms), sum(term.words for term in terms))
