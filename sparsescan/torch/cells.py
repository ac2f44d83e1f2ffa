"""Modules of any recurrent cell, which run whole sequences in kernels."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..checks import check_flag
from ..errors import InputError, InputTypeError, short
from ..recurrent import Cell, Recurrent
from ..recurrent.arguments import Options
from ..recurrent.definition import begins_of, initial_of, sizes_of
from ..recurrent.further import further_inputs
from .calls.sequences import Sequences
from .calls.shapes import register


class CellModule(Sequences, nn.Module):
    """Layers of recurrent cells of one class, as a module; :func:`module` returns its subclasses.

    Arguments, inputs and results have the form of PyTorch's recurrent modules.

    Parameters
    ----------
    input_size, hidden_size : int
        Length of an input, and of each state.
    num_layers : int, default 1
        Number of layers.
    bias : bool, default True
        Whether there are biases.
    batch_first : bool, default False
        Whether inputs and outputs are ``(batch, T, …)``.
    dropout : float, default 0
        Share of the outputs between layers that are dropped in training mode.
    bidirectional : bool, default False
        Whether each layer has two directions.
    device, dtype : optional
        Device and dtype of the parameters.
    **options
        `memory_limit`, `truncate` and `return_states`, as for :class:`RNN`; and options of the
        cells.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong.
    """

    cell: ClassVar[type[Cell]]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._set_options(Options.taken_from(options))
        # This checks all arguments.
        net = Recurrent(
            *(self.cell, input_size, hidden_size, num_layers, bias),
            bidirectional=bidirectional,
            **options,
        )
        self.input_size, self.hidden_size = net.input_size, net.hidden_size
        self.num_layers, self.bidirectional = net.num_layers, net.bidirectional
        one = net.cells[0][0]
        self.bias, self.batch_first = one.bias, check_flag("batch_first", batch_first)
        _check_share(dropout)
        self.dropout = float(dropout)
        self.options: dict[str, Any] = one.options
        self._register()
        self._names = []
        for layer, cells in enumerate(net.cells):
            for back, cell in enumerate(cells):
                own = {net.name_of(name, layer, back): each for name, each in cell.shapes.items()}
                self._names.append(list(own))
                for name, shape in own.items():
                    param = torch.empty(shape, device=device, dtype=dtype)
                    self.register_parameter(name, nn.Parameter(param))
        self._flat_weights_names = [name for names in self._names for name in names]
        self.reset_parameters()

    def _register(self) -> None:
        """Find the program of the cells in this process."""
        self.mode = register(self.cell, self.options, self.bias)
        self.states = self.cell.program_of(self.options, self.bias).states
        self._own_sizes = sizes_of(self.cell, self.options, self.hidden_size)
        self._begins = begins_of(self.cell, self.states) or None
        about = self.num_layers, 1 + self.bidirectional
        self._further = further_inputs(self.cell, self.options, Recurrent.name_of, *about)

    def reset_parameters(self) -> None:
        """Draw the parameters from the cell's distribution."""
        begins, bound = initial_of(self.cell), 1 / math.sqrt(self.hidden_size)
        for name, param in self._named():
            with torch.no_grad():
                if name in begins:
                    param.fill_(begins[name])
                else:
                    nn.init.uniform_(param, -bound, bound)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter with its name in the cell."""
        for names in self._names:
            for name in names:
                yield name.rpartition("_l")[0], getattr(self, name)

    @property
    def _sizes(self) -> list[int]:
        """The size of each state."""
        return self._own_sizes

    @property
    def _is_short(self) -> bool:
        """Whether a state has fewer numbers than there are units."""
        return min(self._own_sizes) < self.hidden_size

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters of each direction of each layer."""
        return [[getattr(self, name) for name in names] for names in self._names]

    def permute_hidden(self, hx: Any, order: Tensor | None) -> Any:
        """Return states with their samples in another order."""
        if order is None or hx is None:
            return hx
        if isinstance(hx, tuple):
            return tuple(each.index_select(1, order) for each in hx)
        return hx.index_select(1, order)

    def _without_kernels(
        self, given: Any, hx: Any, resets: Any = None, reset_states: Any = None, **further: Any
    ) -> Any:
        """Compute step by step, or refuse, calls that have no kernels."""
        return self._differentiably(given, hx, self._weights(), resets, reset_states, further)

    def extra_repr(self) -> str:
        """Return the arguments that the module was made with."""
        about = f"{self.input_size}, {self.hidden_size}"
        defaults = {
            "num_layers": 1,
            "bias": True,
            "batch_first": False,
            "dropout": 0.0,
            "bidirectional": False,
        }
        given = {name: getattr(self, name) for name in defaults} | self.options
        for name, value in given.items():
            if name in self.options or value != defaults[name]:
                about += f", {name}={value!r}"
        return about

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._register()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is module(self.cell):
            return _without_state, (self.cell,), dict(vars(self))
        return super().__reduce_ex__(protocol)


def _check_share(dropout: Any) -> None:
    if not isinstance(dropout, numbers.Real) or not 0 <= float(dropout) <= 1:
        raise InputError(f"dropout is {short(dropout)}; expected a number from 0 to 1")


def _without_state(cell: type[Cell]) -> CellModule:
    """Return an empty module, for a copy or a file to fill."""
    kind = module(cell)
    return kind.__new__(kind)


def module(cell: type[Cell]) -> type[CellModule]:
    """Return a class of PyTorch modules for a class of recurrent cells.

    Its constructor takes the arguments of PyTorch's recurrent modules, and the options of the cell:
    ``module(MGU)(12, 20, num_layers=1, bias=True, batch_first=False, dropout=0.0,
    bidirectional=False, device=None, dtype=None, memory_limit=None, truncate=None,
    return_states=False)``. Parameters have the names of a :class:`~sparsescan.recurrent.Recurrent`,
    in the order of the cell's: ``weight_ih_l0``, ….

    The input is ``(T, batch, input_size)``, with `batch_first` ``(batch, T, input_size)``, or
    ``(T, input_size)``, or a `PackedSequence`. Initial and last states are tensors
    ``(num_layers · directions, batch, hidden_size)``: one tensor if the cell has one state, else a
    tuple with one tensor per state, as in :class:`torch.nn.LSTM`.

    ``net(x, hx, resets=resets)`` sets the state of a sample to zero, or to its `reset_states`,
    before each step where `resets` is True; `resets` has the first axes of the input, or is packed
    like it. See :class:`RNN`. Pass further inputs of a step by name. The module draws random masks
    in training mode (:class:`.Mask`); after ``net.eval()`` they are their expectation.

    The compiled loops of :class:`.TrainingStep` compute whole sequences and all gradients. On the
    CPU they also compute derivatives of any order and transforms of ``torch.func``; see
    :class:`RNN`. PyTorch's own operations compute step by step if the dtype is not float32 or
    float64, under autocast, and on devices other than the CPU and, with CuPy, CUDA. They also run
    calls under ``torch.jit.trace``, whose graph has a fixed number of steps. ``torch.export`` keeps
    one operator, for any number of steps and samples.

    Parameters
    ----------
    cell : class
        A class derived from :class:`sparsescan.recurrent.Cell`.

    Returns
    -------
    class
        A subclass of :class:`torch.nn.Module`; always the same one for a class of cells.

    Raises
    ------
    InputTypeError
        If `cell` is no class of cells.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.recurrent.catalogue import MGU
    >>> from sparsescan.torch import module
    >>> net = module(MGU)(12, 20, num_layers=2, batch_first=True)
    >>> output, state = net(torch.zeros(16, 50, 12))
    >>> output.sum().backward()
    >>> net.weight_hh_l1.grad.shape
    torch.Size([40, 20])
    """
    if not (isinstance(cell, type) and issubclass(cell, Cell)) or cell.step is Cell.step:
        raise InputTypeError(f"cell is {short(cell)}; expected a class of cells, with a step")
    return _module(cell)


@functools.cache
def _module(cell: type[Cell]) -> type[CellModule]:
    attributes = {
        "cell": cell,
        "__doc__": f"Layers of {cell.__name__} cells.",
        "__module__": __name__,
    }
    return type(cell.__name__, (CellModule,), attributes)
