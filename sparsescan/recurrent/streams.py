"""Stream: a network that runs some steps of a sequence at a time, with its states inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays.arrays import host_array, output
from ..checks import check_count, check_has_shape
from ..errors import Allocating, InputError, InputTypeError
from ..kernels.addresses import address_of
from ..locks import new_lock
from ..parameters.parametrised import last_set
from .short import cut, filled
from .stream_parts import Part, layer_parts, read_own, recurrent_part
from .stream_passes import StreamPasses

Array = NDArray[Any]
_Own = TypeVar("_Own", bound="BaseStream")


class BaseStream:
    """Parts that run some steps at a time, with states inside: what streams of all doors have.

    Parameters
    ----------
    parts : sequence of Part
        The parts.
    batch : int
        How many samples there are.
    arguments : tuple
        What a copy is made with.
    """

    def __init__(self, parts: Sequence[Part], batch: int, arguments: tuple[Any, ...]) -> None:
        self.batch = check_count("batch", batch, 1)
        self._parts, self._arguments, self._lock = parts, arguments, new_lock()
        self._dtype = _dtype_of(self._read_params())
        with Allocating("a stream"):
            about = [(part.network, part.further) for part in parts]
            self._passes = StreamPasses(about, self.batch, self._dtype)
        self.inputs, self.outputs = parts[0].network.input_size, parts[-1].outputs
        self._one, self._out = (self.batch, self.inputs), (self.batch, self.outputs)
        self._step, self.is_whole = self._passes.step, self._passes.width == self.outputs
        self.update()
        self._passes.set_states(self._initial())

    def _read_params(self) -> list[Array]:
        return [param for part in self._parts for param in part.params()]

    def update(self) -> None:
        """Read all parameters again; states stay."""
        params = self._read_params()
        if (found := _dtype_of(params)) != self._dtype:
            raise InputTypeError(
                f"parameters have become of {found}; expected {self._dtype}, or a new stream"
            )
        with self._lock:
            self._passes.pack(params)

    # -- States -----------------------------------------------------------------------------------

    def _initial(self) -> list[Array]:
        shapes = self._passes.state_shapes
        pairs = zip(self._parts, shapes, strict=True)
        return [np.broadcast_to(each.initial(), shape) for each, shape in pairs]

    def get_states(self) -> list[Array]:
        """Return the states of each recurrent part, as callers know them."""
        with self._lock:
            every = zip(self._parts, self._passes.states(), strict=True)
        return [
            cut(np, states, part.sizes, part.network.cells[0][0].hidden_size)
            for part, states in every
            if part.sizes
        ]

    def set_states(self, given: Sequence[Any]) -> None:
        """Set the states of each recurrent part."""
        left, states = iter(given), list[Array]()
        for part, shape in zip(self._parts, self._passes.state_shapes, strict=True):
            if not part.sizes:
                states.append(np.zeros(shape, self._dtype))
                continue
            array = host_array("state", next(left))
            if array.dtype != self._dtype:
                raise InputTypeError(f"state has dtype {array.dtype}; expected {self._dtype}")
            check_has_shape("state", array, (*shape[:2], sum(part.sizes)))
            units = part.network.cells[0][0].hidden_size
            states.append(filled(np, array, part.sizes, units))
        with self._lock:
            self._passes.set_states(states)

    def reset(self, which: ArrayLike | None = None) -> None:
        """Set states to those that a sequence begins with: zeros, or parameters.

        Parameters
        ----------
        which : array_like of bool, shape (batch,), optional
            The samples that begin anew; by default all.

        Raises
        ------
        InputError, InputTypeError
            If `which` has another shape, or is no array of bool.
        """
        flags = np.ones(self.batch, bool) if which is None else host_array("which", which)
        if flags.dtype != bool:
            raise InputTypeError(f"which has dtype {flags.dtype}; expected bool")
        check_has_shape("which", flags, (self.batch,), ", one for a sample")
        with self._lock:
            pairs = zip(self._initial(), self._passes.states(), strict=True)
            self._passes.set_states([np.where(flags[:, None], *both) for both in pairs])

    def clone(self: _Own) -> _Own:
        """Return a stream of the same network whose states are those of this one, and its own."""
        return _made(type(self), self._arguments, self.get_states())

    def __reduce__(self) -> Any:
        return _made, (type(self), self._arguments, self.get_states())

    def extent_of(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return how many steps an input of a shape has, and the shape of the outputs."""
        if shape == self._one:
            return 1, self._out
        if len(shape) != 3 or shape[1:] != self._one:
            batch, inputs = self._one
            raise InputError(
                f"x has shape {tuple(shape)}; expected (steps, {batch}, {inputs}) or ({batch}, "
                f"{inputs})"
            )
        return shape[0], (shape[0], *self._out)


def _dtype_of(params: Sequence[Array]) -> np.dtype[Any]:
    """Return the dtype to which parameters promote."""
    for each in params:
        if each.dtype.kind != "f" or each.dtype.itemsize > 8:
            raise InputTypeError(f"a parameter has dtype {each.dtype}; expected float32 or float64")
    return np.result_type(np.float32, *(each.dtype for each in params))


def _made(kind: type[_Own], arguments: tuple[Any, ...], states: list[Array]) -> _Own:
    """Return a stream with some states."""
    stream = kind(*arguments)
    stream.set_states(states)
    return stream


class Stream(BaseStream):
    """Run a network on a sequence that comes bit by bit, with the states inside.

    ``y = stream(x)`` reads some steps, one or a million, and returns their outputs; the next call
    goes on from there. Results do not depend on how a sequence is cut: they have the bits of one
    call. Nothing is kept for a backward pass. It is made by :meth:`.Recurrent.stream` or
    :meth:`.Cell.stream`, runs in host memory, and begins with zeros, or with parameters
    (:class:`.Initial`). Random masks are their expectation.

    Weights are packed once. A parameter that is set, as by ``net.weight_hh_l0 = w`` or
    ``net.weight_hh_l0 -= g``, is read by the next call. What is written into an array that the
    network has, as by ``net.weight_hh_l0[0] = 1`` or by ``w -= g`` with an array of the caller's,
    is seen after :meth:`update`.

    Calls of one stream wait for each other; streams of their own run at once in threads, and leave
    the GIL to others while they compute. A stream can be copied and pickled, with its network.

    Parameters
    ----------
    network : Recurrent or Cell
        The network, of one direction.
    batch : int, default 1
        How many samples run at once, each with states of its own.
    head : sequence of layers, default ()
        Layers of :mod:`sparsescan.jacobians` behind the network, each of which reads the outputs of
        the one before: ``Linear``, ``LayerNorm`` and functions.

    Attributes
    ----------
    batch, inputs, outputs : int
        How many samples there are, and numbers of an input and of an output.
    dtype : dtype
        That of inputs, outputs and states: that of the parameters.
    state : ndarray, shape (layers, batch, state_size)
        A copy of the states. An array that is set is copied.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong; if the network has two directions, or its steps read further inputs
        (:class:`.Given`, :class:`.StepNumber`); or if a layer of the head is not listed here, or
        reads another number of outputs.
    MemoryLimitError
        If it would take more memory than there is.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.jacobians import Linear
    >>> from sparsescan.recurrent import LSTM
    >>> stream = LSTM(1, 40, rng=0).stream(head=[Linear(40, 1, rng=0)])
    >>> x = np.random.default_rng(0).standard_normal((480, 1, 1), np.float32)
    >>> whole = stream(x)
    >>> stream.reset()
    >>> some = [stream(x[:128]), stream(x[128:]), stream(x[0])]  # the last one is a step
    >>> [each.shape for each in some]
    [(128, 1, 1), (352, 1, 1), (1, 1)]
    >>> bool((np.concatenate(some[:2]) == whole).all())
    True
    """

    def __init__(self, network: Any, batch: int = 1, head: Iterable[Any] = ()) -> None:
        layers = tuple(head)
        first = recurrent_part(network, lambda name: network.params[name])
        self._layers = [*(cell for cells in network.cells for cell in cells), *layers]
        parts = [first, *layer_parts(layers, first.outputs, read_own)]
        super().__init__(parts, batch, (network, batch, layers))

    def update(self) -> None:
        """Read all parameters again, with what was written into their arrays; states stay."""
        seen = [(each, last_set(each)) for each in self._layers]
        super().update()
        self._seen = seen

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of inputs, outputs and states."""
        return self._dtype

    @property
    def state(self) -> Array:
        """A copy of the states."""
        return self.get_states()[0]

    @state.setter
    def state(self, states: ArrayLike) -> None:
        self.set_states([states])

    def __call__(self, x: ArrayLike, out: Array | None = None) -> Array:
        """Return the outputs of the next steps.

        Parameters
        ----------
        x : array_like, shape (steps, batch, inputs) or (batch, inputs)
            The inputs of some steps, of none, or those of one.
        out : ndarray, optional
            Where to write the outputs: contiguous, of the shape and dtype that is returned.

        Returns
        -------
        ndarray, shape (steps, batch, outputs) or (batch, outputs)
            The outputs: a new array, or `out`.

        Raises
        ------
        InputError, InputTypeError
            If a shape or a dtype is wrong, or `out` shares memory with `x`.
        """
        if type(x) is not np.ndarray or x.dtype is not self._dtype or not x.flags.carray:
            x = self._read(x)
        steps, shape = (1, self._out) if x.shape == self._one else self.extent_of(x.shape)
        if out is None:
            out = np.empty(shape, self._dtype)
        else:
            output(np, out, shape, self._dtype, apart=[x])
        with self._lock:
            for layer, seen in self._seen:
                if last_set(layer) is not seen:
                    self.update()
                    break
            if steps == 1 and self.is_whole:
                self._step(x, out)
            else:
                self._run(steps, x, out)
        return out

    def _read(self, x: Any) -> Array:
        """Return a copy of what is no contiguous array of NumPy."""
        array = host_array("x", x)
        if array.dtype != self._dtype:
            raise InputTypeError(f"x has dtype {array.dtype}; expected {self._dtype}")
        return np.array(array, order="C")

    def _run(self, steps: int, x: Array, out: Array) -> None:
        """Compute the outputs of some steps, of which the first numbers are the caller's."""
        whole = out
        if not self.is_whole:
            whole = np.empty((*x.shape[:-1], self._passes.width), self._dtype)
        self._passes.run_at(steps, address_of(x), address_of(whole))
        if whole is not out:
            out[...] = whole[..., : self.outputs]
