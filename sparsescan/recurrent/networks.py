"""Recurrent networks: layers of cells, in one direction or both."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..checks import check_count, check_flag
from ..errors import InputError, InputTypeError, short
from ..locks import cached_property
from ..parameters.fixed import Fixed
from .cell import Cell
from .cells import GRUCell, LSTMCell, RNNCell
from .definition import matrices_of, sizes_of
from .step import TrainingStep
from .streams import Stream

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import OptionsDict

# A layer takes 100 µs to make, whatever its size, and no network needs nearly as many.
_MOST_LAYERS = 10_000


class Recurrent(Fixed):
    """Layers of recurrent cells of one class, in one direction or both.

    Each layer reads the outputs ``h_t`` of the layer below. A bidirectional layer has two cells,
    one of which runs from the last step to the first; its outputs are ``[h_t, h'_t]``. The name of
    a parameter is that of the cell's, with the layer, as in PyTorch: ``weight_hh_l0``,
    ``bias_ih_l1_reverse``.

    Parameters
    ----------
    cell : class
        A class of cells, derived from :class:`Cell`.
    input_size, hidden_size : int
        Length of an input ``x_t`` and of each ``h_t``.
    num_layers : int, default 1
        Number of layers, at most 10,000.
    bias : bool, default True
        Whether there are biases.
    bidirectional : bool, default False
        Whether each layer has two directions.
    masks : dict of str to array_like of bool, optional
        By the name of a matrix: True where a weight is kept. A pruned weight counts as 0 and has a
        gradient of 0. If less than a quarter of a matrix is kept, kernels read only the kept
        weights. A NaN then does not pass a pruned weight, though it would pass a weight of 0.
    dtype : {float32, float64}, default float32
        Dtype of initial parameters.
    rng : numpy.random.Generator or int, optional
        Source of the initial parameters, from the same distribution as PyTorch.
    **options
        Options that the class of cells declares, such as ``dt=0.1``.

    Attributes
    ----------
    cells : tuple of tuple of Cell
        The cells of each layer; the forward direction comes first.
    state_size : int
        Length of a cell's state: `hidden_size` for each state, such as ``h`` and ``c``, or fewer
        for a :class:`.State`.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.

    See Also
    --------
    sparsescan.recurrent.step.TrainingStep : Runs the network forward and backward.

    Examples
    --------
    >>> from sparsescan.recurrent import Recurrent
    >>> from sparsescan.recurrent.catalogue import MGU
    >>> net = Recurrent(MGU, 12, 20, num_layers=2, bidirectional=True)
    >>> net.weight_hh_l1_reverse.shape
    (40, 20)
    """

    def __init__(
        self,
        cell: type[Cell],
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        *,
        bidirectional: bool = False,
        masks: Mapping[str, ArrayLike] | None = None,
        dtype: DTypeLike = np.float32,
        rng: np.random.Generator | int | None = None,
        **options: Any,
    ) -> None:
        if not (isinstance(cell, type) and issubclass(cell, Cell)):
            raise InputTypeError(f"cell is {short(cell)}; expected a class derived from Cell")
        self.input_size = check_count("input_size", input_size, 1)
        self.hidden_size = check_count("hidden_size", hidden_size, 1)
        self.num_layers = check_count("num_layers", num_layers, 1, _MOST_LAYERS)
        self.bidirectional = check_flag("bidirectional", bidirectional)
        directions = range(1 + self.bidirectional)
        masks, matrices = _read_masks(masks), matrices_of(cell)
        known = {
            self.name_of(name, layer, back)
            for name in matrices
            for layer in range(self.num_layers)
            for back in directions
        }
        if unknown := set(masks) - known:
            such = f", such as {min(known)!r}" if known else ", of which there are none"
            raise InputError(
                f"masks has the key {short(min(unknown, key=str))}; expected names of weights{such}"
            )
        seeds = _seeds(rng, self.num_layers * len(directions))
        layers, sizes = [], [0]
        for layer in range(self.num_layers):
            width = self.input_size if layer == 0 else sizes[0] * len(directions)
            own = []
            for back in directions:
                given = {
                    f"{name}_mask": masks.get(self.name_of(name, layer, back)) for name in matrices
                }
                about = {**options, **given, "dtype": dtype, "rng": next(seeds)}
                own.append(cell(width, self.hidden_size, bias, **about))
            layers.append(tuple(own))
            sizes = sizes_of(cell, own[0].options, self.hidden_size)
        self.cells: tuple[tuple[Cell, ...], ...] = tuple(layers)
        self.state_size = sum(sizes)
        for name, (one, parameter) in self._places.items():
            vars(one).setdefault("_titles", {})[parameter] = f"{type(self).__name__}.{name}"

    @staticmethod
    def name_of(parameter: str, layer: int, back: int) -> str:
        """Return PyTorch's name of a parameter of a cell, for example ``weight_hh_l0_reverse``."""
        return f"{parameter}_l{layer}{'_reverse' * back}"

    @property
    def params(self) -> dict[str, Any]:
        """The parameters by their names, not copied."""
        return {name: getattr(cell, own) for name, (cell, own) in self._places.items()}

    def training_step(self, **options: Unpack[OptionsDict]) -> TrainingStep:
        """Return a training step, which runs this network forward and backward.

        Parameters
        ----------
        **options
            `memory_limit`, `truncate` and `return_states`, as for :class:`.TrainingStep`.

        Returns
        -------
        TrainingStep
            It keeps its memory from one training step to the next.

        Raises
        ------
        InputError, InputTypeError
            If an option is wrong, as for :class:`.TrainingStep`.
        """
        return TrainingStep(self, **options)

    def stream(self, batch: int = 1, *, head: Iterable[Any] = ()) -> Stream:
        """Return a stream, which runs this network on some steps at a time.

        Parameters
        ----------
        batch, head
            As for :class:`.Stream`.

        Returns
        -------
        Stream
            It reads the parameters that are set later, and has states of its own.

        Raises
        ------
        InputError, InputTypeError, MemoryLimitError
            As :class:`.Stream`.
        """
        return Stream(self, batch, head)

    def __getattr__(self, name: str) -> Any:
        place = self._places.get(name) if "cells" in vars(self) else None
        if place is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(*place)

    def __setattr__(self, name: str, value: Any) -> None:
        place = self._places.get(name) if "cells" in vars(self) else None
        if place is None:
            super().__setattr__(name, value)
        else:
            setattr(*place, value)

    def __repr__(self) -> str:
        cell = f"{type(self.cells[0][0]).__name__}, " if type(self) is Recurrent else ""
        sizes = f"{cell}{self.input_size}, {self.hidden_size}"
        layers = f", num_layers={self.num_layers}" if self.num_layers > 1 else ""
        both = ", bidirectional=True" if self.bidirectional else ""
        return f"{type(self).__name__}({sizes}{layers}{both})"

    @cached_property
    def _places(self) -> dict[str, tuple[Cell, str]]:
        """Return the cell of each parameter, and the parameter's name in the cell."""
        return {
            self.name_of(name, layer, back): (cell, name)
            for layer, cells in enumerate(self.cells)
            for back, cell in enumerate(cells)
            for name in cell.parameter_names
        }


class RNN(Recurrent):
    """Layers of :class:`RNNCell`, with the parameters of :class:`torch.nn.RNN`.

    Parameters
    ----------
    input_size, hidden_size, num_layers, bias
        As for :class:`Recurrent`.
    nonlinearity : {"tanh", "relu"}, default "tanh"
        ``φ``.
    **options
        Any other arguments of :class:`Recurrent`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.recurrent import RNN
    >>> net = RNN(3, 5, num_layers=2, rng=0)
    >>> step = net.training_step()
    >>> output, state = step.forward(np.ones((7, 4, 3), np.float32), lengths=[7, 5, 2, 7])
    >>> grads = step.backward(grad_state=np.ones_like(state))
    >>> sorted(grads.params)[:3]
    ['bias_hh_l0', 'bias_hh_l1', 'bias_ih_l0']
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        *,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        **options: Any,
    ) -> None:
        options["nonlinearity"] = nonlinearity
        super().__init__(RNNCell, input_size, hidden_size, num_layers, bias, **options)


class GRU(Recurrent):
    """Layers of :class:`GRUCell`, with the arguments of :class:`Recurrent`.

    The parameters are those of :class:`torch.nn.GRU`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(GRUCell, input_size, hidden_size, num_layers, bias, **options)


class LSTM(Recurrent):
    """Layers of :class:`LSTMCell`, with the arguments of :class:`Recurrent`.

    The parameters are those of :class:`torch.nn.LSTM`. Its state is a pair; here it is ``[h, c]``.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(LSTMCell, input_size, hidden_size, num_layers, bias, **options)


def _read_masks(masks: Any) -> dict[Any, Any]:
    if masks is None:
        return {}
    try:
        return dict(masks)
    except Exception:  # a caller's own class may raise anything
        raise InputTypeError(
            f"masks is {short(masks)}; expected a dict from names of weights to arrays"
        ) from None


def _seeds(rng: Any, count: int) -> Any:
    """Return a source of random numbers for each cell; cells raise if `rng` is wrong."""
    try:
        seed = operator.index(rng)
    except Exception:
        return iter([rng] * count)
    return iter([seed] * count if seed < 0 else np.random.default_rng(seed).spawn(count))
