"""Networks of layers: Sequential, and Residual blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from .. import api
from ..arrays.arrays import Mirrored, check_array, check_memory, namespace, output
from ..chains.containers import BatchedCSR, as_matrix
from ..chains.implicit import ImplicitStep
from ..errors import InputError, InputTypeError
from ..locks import cached_property
from ..parameters.fixed import Fixed
from ..plan.scan_plan import ScanPlan
from ..symbolic.implicit import ImplicitPattern, Step
from ..symbolic.indexed import IndexedPattern, indexed
from ..symbolic.pattern import Pattern, multiply_adds, of_keys, rows_of, trusted
from .shared.operator import Operator
from .training.network_step import NetworkStep

Array = Any


class Sequential(Fixed):
    """Layers one after the other: their chain for a scan, and gradients from its result.

    A :class:`Residual` among them becomes the steps of its layers. These steps carry along the
    arrays that the block reads or adds later, so no product is needed, and nothing fills in.

    Parameters
    ----------
    ops : iterable of Operator
        The layers, from the first to the last; the output shape of each is the input shape of the
        next.

    Attributes
    ----------
    ops : tuple of Operator
        The layers as they were given.
    layers : tuple of Operator
        The layers as they run: a :class:`Residual` is replaced by its layers, then the layers of
        its shortcut.
    input_shape, output_shape : tuple of int
        Shapes of one sample.

    Raises
    ------
    InputError
        If the shapes do not chain, or there are no layers.
    InputTypeError
        If an item is no operator.

    Notes
    -----
    BPPSA (MLSys 2020), section 3: equation 3 is the scan over :meth:`jacobians`, and equation 2 is
    :meth:`param_grads`.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.jacobians import Conv2d, Flatten, Linear, ReLU, Sequential
    >>> net = Sequential([
    ...     Conv2d(1, 4, 3, input_shape=(1, 8, 8), rng=0),
    ...     ReLU(input_shape=(4, 6, 6)),
    ...     Flatten(input_shape=(4, 6, 6)),
    ...     Linear(144, 10, rng=0),
    ... ])
    >>> plan = net.plan()  # once
    >>> x = np.random.default_rng(0).random((16, 1, 8, 8), np.float32)
    >>> xs = net.activations(x)  # on every iteration
    >>> grad = xs[-1] / len(x)  # of the loss, in the output
    >>> grads = plan.exclusive_scan(grad, net.values(xs))
    >>> [g["weight"].shape for g in net.param_grads(xs, grads) if g]
    [(4, 1, 3, 3), (10, 144)]
    """

    def __init__(self, ops: Iterable[Operator]) -> None:
        self.ops = _chained("ops", ops)
        self._steps = _steps(self.ops, 0, "")
        self.layers = tuple(step.op for step in self._steps if isinstance(step, _LayerStep))
        self.input_shape = self.ops[0].input_shape
        self.output_shape = self.ops[-1].output_shape

    @cached_property
    def patterns(self) -> list[Pattern]:
        """Pattern of every step, from the LAST to the first.

        Raises
        ------
        MemoryLimitError
            If they would take more memory than there is.
        """
        entries = sum({id(op): op.nnz for op in self.layers if op.nnz > sum(op.shape)}.values())
        check_memory(f"the patterns of {self!r}", entries * np.dtype(np.int32).itemsize)
        return [step.pattern for step in reversed(self._steps)]

    @cached_property
    def implicit_patterns(self) -> list[Step]:
        """Patterns of the steps that :meth:`implicit` returns, from the LAST to the first.

        Steps are explicit if factors save nothing, such as the steps that carry the input of a
        residual block along, or add it.

        Raises
        ------
        MemoryLimitError
            If they would take more memory than there is.
        """
        return [step.implicit_pattern for step in reversed(self._steps)]

    def plan(self, **options: Any) -> ScanPlan:
        """Plan the scans of the chain; `options` are those of :func:`sparsescan.plan`."""
        return api.plan(self.patterns, **options)

    def training_step(self, *, memory_limit: int | None = None) -> NetworkStep:
        """Return an object that computes the network and all its gradients.

        It takes a small part of the time of :meth:`activations`, :meth:`values`, a scan and
        :meth:`param_grads`, above all if weights are pruned.

        Parameters
        ----------
        memory_limit : int, optional
            The most bytes to take, without the caller's arrays; by default what the machine has.

        Returns
        -------
        NetworkStep
            Its methods run the network forward and backward.

        Raises
        ------
        InputError, InputTypeError
            If `memory_limit` is not a valid size.
        """
        return NetworkStep(self, memory_limit)

    def forward(self, x: Array) -> Array:
        """Compute the output of the last layer.

        Parameters
        ----------
        x : array_like, shape ``input_shape`` or ``(batch, *input_shape)``
            The input.

        Returns
        -------
        ndarray, shape ``output_shape`` or ``(batch, *output_shape)``
            The output.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`.Operator.forward`.
        """
        return self.activations(x)[-1]

    def activations(self, x: Array) -> list[Array]:
        """Compute the input of every step, and the output of the last: ``[x_0, x_1, …, x_n]``.

        Parameters
        ----------
        x : array_like, shape ``input_shape`` or ``(batch, *input_shape)``
            The input.

        Returns
        -------
        list of ndarray
            One array more than steps. A step that leaves an array unchanged repeats it.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`.Operator.forward`.
        """
        x = check_array("x", x)
        inputs: list[Array] = [x]
        skipped: list[Array] = []
        for step in self._steps:
            x = step.forward(x, skipped)
            inputs.append(x)
        return inputs

    def values(
        self, activations: Sequence[Array], *, out: Sequence[Array] | None = None
    ) -> list[Array]:
        """Compute the values of every Jacobian, from the LAST to the first, for a plan's scans.

        Parameters
        ----------
        activations : list of ndarray
            The result of :meth:`activations`.
        out : list of ndarray, optional
            An earlier result for an input of the same shape and dtype, which is overwritten.

        Returns
        -------
        list of ndarray
            Arrays ``(nnz,)``, shared by all samples, or ``(batch, nnz)``.

        Raises
        ------
        InputError, InputTypeError, DeviceError, MemoryLimitError
            As :meth:`.Operator.values`.
        """
        xs = _listed("activations", activations, len(self._steps) + 1)
        none: list[Any] = [None] * len(self._steps)
        buffers = none if out is None else _listed("out", out, len(self._steps))
        return [
            step.values(x, y, buffer)
            for step, x, y, buffer in zip(
                reversed(self._steps), xs[-2::-1], xs[:0:-1], buffers, strict=True
            )
        ]

    def jacobians(self, activations: Sequence[Array]) -> list[sp.csr_array | BatchedCSR]:
        """Return the chain for :func:`sparsescan.exclusive_scan`, from the LAST to the first.

        Parameters
        ----------
        activations : list of ndarray
            The result of :meth:`activations`.

        Returns
        -------
        list of csr_array or BatchedCSR
            One for each step; a BatchedCSR if the values differ between samples.

        Raises
        ------
        InputError, InputTypeError, DeviceError, MemoryLimitError
            As :meth:`.Operator.values`.
        """
        return [
            as_matrix(values, pattern)
            for values, pattern in zip(self.values(activations), self.patterns, strict=True)
        ]

    def implicit(
        self, activations: Sequence[Array]
    ) -> list[ImplicitStep | sp.csr_array | BatchedCSR]:
        """Return the chain, with implicit steps wherever they save memory.

        A scan gives the same gradients as for :meth:`jacobians`, one for each step, and
        :meth:`param_grads` takes them. A convolution is given by its weights and a table of their
        places. A normalisation or a softmax is given by a diagonal and the sums that couple
        elements.

        Parameters
        ----------
        activations : list of ndarray
            The result of :meth:`activations`.

        Returns
        -------
        list of ImplicitStep, csr_array or BatchedCSR
            From the LAST step to the first, with :attr:`implicit_patterns`. Weights are not copied,
            unless they are in a residual block: a scan reads their current values.

        Raises
        ------
        InputError, InputTypeError, DeviceError, MemoryLimitError
            As :meth:`.Operator.implicit`.

        Examples
        --------
        >>> import numpy as np, sparsescan
        >>> from sparsescan.jacobians import Conv2d, LayerNorm, Sequential
        >>> net = Sequential([
        ...     Conv2d(1, 4, 3, input_shape=(1, 8, 8), rng=0),
        ...     LayerNorm((4, 6, 6)),
        ... ])
        >>> plan = sparsescan.plan(net.implicit_patterns, batch=16, dtype=np.float32)  # once
        >>> saved = plan.to_dict()["implicit"]
        >>> saved["bytes"] < saved["explicit_bytes"] / 10
        True
        >>> xs = net.activations(np.random.default_rng(0).random((16, 1, 8, 8), np.float32))
        >>> grads = plan.exclusive_scan(np.ones((16, 144), np.float32), net.implicit(xs))
        >>> [g["weight"].shape for g in net.param_grads(xs, grads)]
        [(4, 1, 3, 3), (4, 6, 6)]
        """
        xs = _listed("activations", activations, len(self._steps) + 1)
        return [
            step.implicit(x, y)
            for step, x, y in zip(reversed(self._steps), xs[-2::-1], xs[:0:-1], strict=True)
        ]

    def param_grads(
        self, activations: Sequence[Array], gradients: Sequence[Array]
    ) -> list[dict[str, Array]]:
        """Return the gradients in the parameters of every layer, summed over the batch.

        Parameters
        ----------
        activations : list of ndarray
            The result of :meth:`activations`.
        gradients : list of ndarray
            The result of the scan, from the LAST to the first.

        Returns
        -------
        list of dict
            For every layer of `layers`, the gradients by the names of the parameters; empty if it
            has none. Layers are computed independently of each other.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`.Operator.param_grads`.
        """
        count = len(self._steps)
        xs = _listed("activations", activations, count + 1)
        listed = _listed("gradients", gradients, count, count + 1)[:count]
        return [
            step.param_grads(x, check_array(f"gradients[{count - 1 - k}]", grad))
            for k, (step, x, grad) in enumerate(
                zip(self._steps, xs[:-1], reversed(listed), strict=True)
            )
            if isinstance(step, _LayerStep)
        ]

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return f"Sequential({self.input_shape} → {self.output_shape}, {len(self)} steps)"

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"  {op!r}" for op in self.ops)])


class Residual(Operator):
    """Layers and a shortcut around them: ``y = s(x) + f_k(…f_1(x))``.

        (∂y/∂x)ᵀ = S + J_1 J_2 ⋯ J_k,

    where ``J_i`` is the transposed Jacobian of ``f_i``, and ``S`` is the product of the transposed
    Jacobians of the shortcut's layers, or the identity if there are none.

    The block's own pattern and values are this sum, which fills in. A :class:`Sequential` does not
    need them: it has a step for every layer, which carries along what other layers read or return.

    Parameters
    ----------
    *ops : Operator
        The layers ``f_1, …, f_k``.
    shortcut : iterable of Operator, default ()
        The layers of ``s``, from the first to the last. They start with the input shape of ``f_1``
        and end with the output shape of ``f_k``.

    Attributes
    ----------
    ops, shortcut : tuple of Operator
        The layers as they were given.

    Raises
    ------
    InputError, InputTypeError
        If the shapes do not chain or cannot be added, or an item is no operator.

    Notes
    -----
    Residual networks (He, Zhang, Ren and Sun, CVPR 2016), equations 1 and 2. Parameters are named
    by the places of their layers: ``"0.weight"`` is the weight of ``f_1``, ``"shortcut.0.weight"``
    that of the shortcut's first layer.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsescan.jacobians import Linear, Residual, Tanh
    >>> block = Residual(Linear(2, 2), Tanh(input_shape=(2,)))
    >>> block.ops[0].weight = np.array([[0.0, 1.0], [0.0, 0.0]])
    >>> block.ops[0].bias = np.zeros(2)
    >>> block.jacobian(np.zeros(2)).toarray()
    array([[1., 0.],
           [1., 1.]])
    >>> wider = Residual(Linear(2, 3), shortcut=[Linear(2, 3, bias=False)])
    >>> [*wider.params], wider.output_shape
    (['0.weight', '0.bias', 'shortcut.0.weight'], (3,))
    """

    def __init__(self, *ops: Operator, shortcut: Iterable[Operator] = ()) -> None:
        self.ops = _chained("ops", ops)
        self.shortcut = _chained("shortcut", shortcut, least=0)
        shape, end = self.ops[0].input_shape, self.ops[-1].output_shape
        if not self.shortcut and end != shape:
            raise InputError(
                f"ops end with output_shape {end}; expected {shape}, the input to which it is "
                "added, or a shortcut"
            )
        if self.shortcut and self.shortcut[0].input_shape != shape:
            raise InputError(
                f"shortcut[0] has input_shape {self.shortcut[0].input_shape}; expected {shape}, "
                "that of ops[0]"
            )
        if self.shortcut and self.shortcut[-1].output_shape != end:
            raise InputError(
                f"shortcut ends with output_shape {self.shortcut[-1].output_shape}; expected "
                f"{end}, the output of ops to which it is added"
            )
        self._set_shapes(shape, None)
        self._set_output(end)

    @cached_property
    def _network(self) -> Sequential:
        """The block as a network; the product of its steps is the Jacobian."""
        return Sequential([self])

    @cached_property
    def _layers(self) -> dict[str, Operator]:
        """The layers by their places, as they run."""
        steps = (each for each in self._network._steps if isinstance(each, _LayerStep))
        return {step.name.removeprefix("0."): step.op for step in steps}

    @property
    def _reads_input(self) -> bool:  # type: ignore[override]
        return any(op._reads_input for op in self._layers.values())

    @property
    def _samples_apart(self) -> bool:  # type: ignore[override]
        return all(op._samples_apart for op in self._layers.values())

    @property
    def params(self) -> dict[str, Array]:
        """The parameters of all layers, not copied."""
        return self._placed(op.params for op in self._layers.values())

    def _placed(self, layers: Iterable[dict[str, Array]]) -> dict[str, Array]:
        """Return the arrays of all layers by their places and names."""
        return {
            f"{place}.{name}": array
            for place, arrays in zip(self._layers, layers, strict=True)
            for name, array in arrays.items()
        }

    def __repr__(self) -> str:
        # Entries are not counted: the product may be huge.
        words = [*map(repr, self.ops)]
        if self.shortcut:
            words.append(f"shortcut={self.shortcut!r}")
        return f"Residual({', '.join(words)})"

    def _core_nnz(self) -> int:
        return self._core_pattern().nnz

    def _core_pattern(self) -> Pattern:
        return self._products[-1].pattern

    def _check_memory(self) -> None:
        """Check nothing: counting the entries builds the pattern anyway."""

    @cached_property
    def _products(self) -> list[_Product]:
        """The product of the first two steps, of that product and the third, and so on."""
        products: list[_Product] = []
        first, *others = reversed(self._network.patterns)
        for pattern in others:
            products.append(_Product(products[-1].pattern if products else first, pattern))
        return products

    def _forward(self, xp: Any, x: Array) -> Array:
        return self._network.forward(x)

    def _fill(self, xp: Any, x: Array, y: Array, out: Array) -> None:
        # These values do not depend on the input, so any input will do.
        x = xp.zeros((1, *self._core), out.dtype) if x is None else x.astype(out.dtype, copy=False)
        product, *others = reversed(self._network.values(self._network.activations(x)))
        for step, values in zip(self._products, others, strict=True):
            product = step.values(xp, product, values)
        out[...] = product

    def _param_grads(self, xp: Any, x: Array, grad_y: Array) -> dict[str, Array]:
        xs = self._network.activations(x)
        grads: Any = api.exclusive_scan(grad_y.reshape(len(x), -1), self._network.jacobians(xs))
        return self._placed(self._network.param_grads(xs, grads))


class _LayerStep:
    """A layer, named by its place, with `carried` entries that pass unchanged."""

    def __init__(self, name: str, op: Operator, carried: int) -> None:
        self.name, self.op, self._carried = name, op, carried

    @cached_property
    def pattern(self) -> Pattern:
        return _carrying(self.op.pattern, self._carried)

    @cached_property
    def implicit_pattern(self) -> Step:
        step, carried = self.op.implicit_pattern, self._carried
        if carried == 0 or not isinstance(step, ImplicitPattern):
            return step if carried == 0 else self.pattern
        factors: list[Pattern | IndexedPattern] = []
        for factor, index in zip(step.factors, step.indexed, strict=True):
            whole = _carrying(factor, carried)
            if index is None:
                factors.append(whole)
                continue
            # One more weight, equal to 1, passes the rest of the state on.
            starts = np.concatenate([index.starts, np.full(carried, index.distinct)])
            sources = np.concatenate([index.sources, [index.size]])
            factors.append(indexed(whole, starts, sources, index.size + 1))
        return ImplicitPattern(factors)

    def implicit(self, x: Array, y: Array) -> Any:
        pattern = self.implicit_pattern
        if not isinstance(pattern, ImplicitPattern):
            return as_matrix(self.values(x, y, None), self.pattern)
        step = self.op.implicit(x, y)
        if self._carried == 0:
            return step
        values = []
        for array, index in zip(step.values, pattern.indexed, strict=True):
            xp, more = namespace(array), 1 if index is not None else self._carried
            ones = xp.ones((*array.shape[:-1], more), array.dtype)
            values.append(xp.concatenate([array, ones], axis=-1))
        return ImplicitStep(values, pattern)

    def forward(self, x: Array, skipped: list[Array]) -> Array:
        return self.op.forward(x)

    def values(self, x: Array, y: Array, out: Array) -> Array:
        if self._carried == 0:
            return self.op.values(x, y, out=out)
        own = self.op.values(x, y)
        shape = (*own.shape[:-1], own.shape[-1] + self._carried)
        room = output(namespace(own), out, shape, own.dtype)
        room[..., : own.shape[-1]] = own
        room[..., own.shape[-1] :] = 1
        return room if out is None else out

    def param_grads(self, x: Array, grad: Array) -> dict[str, Array]:
        """Return the gradients of the parameters from the gradient in the whole state."""
        size = math.prod(self.op.output_shape)
        if grad.ndim == 0 or grad.shape[-1] != size + self._carried:
            raise InputError(
                f"a gradient has shape {grad.shape}; expected (·, {size + self._carried}) behind "
                f"{self.op!r}"
            )
        return self.op.param_grads(x, grad[..., :size])


def _carrying(own: Pattern, carried: int) -> Pattern:
    """Return a pattern with `carried` more entries, on a diagonal after the others."""
    if carried == 0:
        return own
    shape = own.shape[0] + carried, own.shape[1] + carried
    more = np.arange(1, carried + 1)
    return trusted(
        np.concatenate([own.indptr, own.nnz + more]),
        np.concatenate([own.indices, own.shape[1] - 1 + more]),
        shape,
    )


class _Moves:
    """A step that copies, exchanges or adds arrays of the state; its values are all 1.

    The state is ``[x, s_1, s_2, …]``. Layers work on ``x``. Each residual block around them, from
    the innermost to the outermost, has one ``s``: its input or, within its shortcut, the output of
    its layers.

    Parameters
    ----------
    sizes : sequence of int
        Sizes of the arrays of the state; the last one passes unchanged.
    places : sequence of tuple of int
        The places of each array in the next state: it may go to two places, or join another at one.
    move : callable
        The function that moves ``x`` and the rest of the state.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        places: Sequence[tuple[int, ...]],
        move: Callable[[Array, list[Array]], Array],
    ) -> None:
        self._sizes, self._places, self._move = sizes, places, move

    @cached_property
    def pattern(self) -> Pattern:
        moves = list(zip(self._sizes, self._places, strict=True))
        sizes = dict(sorted((place, size) for size, places in moves for place in places))
        starts = np.cumsum([0, *sizes.values()])
        columns = [np.add.outer(np.arange(size), starts[list(places)]) for size, places in moves]
        counts = np.repeat([len(places) for places in self._places], self._sizes)
        return trusted(
            np.concatenate([[0], np.cumsum(counts)]),
            np.concatenate([each.reshape(-1) for each in columns]),
            (len(counts), int(starts[-1])),
        )

    def forward(self, x: Array, skipped: list[Array]) -> Array:
        return self._move(x, skipped)

    def values(self, x: Array, y: Array, out: Array) -> Array:
        x = check_array("activations", x)
        room = output(namespace(x), out, (self.pattern.nnz,), x.dtype)
        room[...] = 1
        return room if out is None else out

    @property
    def implicit_pattern(self) -> Pattern:
        """The pattern itself: factors save nothing."""
        return self.pattern

    def implicit(self, x: Array, y: Array) -> Any:
        """Return the step of :attr:`implicit_pattern`."""
        return as_matrix(self.values(x, y, None), self.pattern)


def _fork(x: Array, skipped: list[Array]) -> Array:
    skipped.append(x)
    return x


def _swap(x: Array, skipped: list[Array]) -> Array:
    x, skipped[-1] = skipped[-1], x
    return x


def _join(x: Array, skipped: list[Array]) -> Array:
    return x + skipped.pop()


class _Product:
    """The product of two sparse matrices by gathers from places that are computed once."""

    def __init__(self, a: Pattern, b: Pattern) -> None:
        pairs = multiply_adds(a, b)
        check_memory(f"the product of {a} and {b}", 6 * 8 * pairs)
        counts = np.diff(b.indptr).astype(np.int64)[a.indices]
        left = np.repeat(np.arange(a.nnz), counts)
        within = np.arange(pairs) - np.repeat(np.cumsum(counts) - counts, counts)
        right = b.indptr.astype(np.int64)[a.indices[left]] + within
        keys = rows_of(a)[left] * b.shape[1] + b.indices[right]
        unique, place = np.unique(keys, return_inverse=True)
        self.pattern = of_keys(unique, (a.shape[0], b.shape[1]))
        # The first pair of every entry, then the second pair of entries that have two, and so on.
        order = np.argsort(place, kind="stable")
        first = np.searchsorted(place[order], np.arange(self.pattern.nnz))
        turn = np.empty(pairs, np.int64)
        turn[order] = np.arange(pairs) - first[place[order]]
        order = np.argsort(turn, kind="stable")
        ends = np.cumsum(np.bincount(turn))
        self._turns = [
            tuple(Mirrored(array[chosen]) for array in (place, left, right))
            for chosen in np.split(order, ends[:-1])
        ]

    def values(self, xp: Any, a: Array, b: Array) -> Array:
        """Compute the values of ``A B``, shape ``(…, nnz)``; the order of the sums is fixed."""
        lead = max(a.shape[:-1], b.shape[:-1], key=len)
        sums = xp.zeros((*lead, self.pattern.nnz), a.dtype)
        for turn in self._turns:
            place, left, right = (array.on(xp) for array in turn)
            sums[..., place] += a[..., left] * b[..., right]
        return sums


def _listed(name: str, arrays: Any, *counts: int) -> list[Any]:
    """Return a list of `count` arrays, or raise an error that names the argument.

    Two counts allow the result of an exclusive or an inclusive scan.
    """
    kinds: Any
    kinds, expected, wanted = Sequence, "a list of arrays", f"{counts[0]}"
    if len(counts) > 1:
        kinds, expected = (Sequence, np.ndarray), "what a scan returned"
        wanted = f"{counts[0]}, as the exclusive scan returns, or {counts[1]}"
    is_one = isinstance(arrays, (str, bytes)) or getattr(arrays, "shape", None) == ()
    if is_one or not isinstance(arrays, kinds):
        raise InputTypeError(f"{name} is a {type(arrays).__name__}; expected {expected}")
    try:
        length, listed = len(arrays), list(itertools.islice(arrays, counts[-1] + 1))
    except Exception as error:  # a caller's own class may raise any
        raise InputTypeError(f"{name} cannot be read: {error}") from None
    if length not in counts or len(listed) != length:
        raise InputError(f"{name} has {length} entries; expected {wanted}")
    return listed


def _chained(name: str, ops: Iterable[Operator], least: int = 1) -> tuple[Operator, ...]:
    """Return operators whose shapes chain, or raise an error that names the argument."""
    if not isinstance(ops, Iterable):
        raise InputTypeError(f"{name} is a {type(ops).__name__}; expected a list of operators")
    chain: list[Any] = []
    try:
        # An iterable may be endless, so reading stops at the first item that is no operator.
        for op in ops:
            chain.append(op)
            if not isinstance(chain[-1], Operator):
                break
    except Exception as error:  # a caller's own iterable may raise any
        raise InputTypeError(f"{name} cannot be read: {error}") from None
    if len(chain) < least:
        raise InputError(f"{name} is empty; expected at least one operator")
    for k, op in enumerate(chain):
        if not isinstance(op, Operator):
            raise InputTypeError(f"{name}[{k}] is a {type(op).__name__}; expected an Operator")
        if k > 0 and op.input_shape != chain[k - 1].output_shape:
            raise InputError(
                f"{name}[{k}] has input_shape {op.input_shape}; expected "
                f"{chain[k - 1].output_shape}, the output of {name}[{k - 1}]"
            )
    return tuple(chain)


def _steps(ops: Sequence[Operator], carried: int, before: str) -> list[Any]:
    """Return the steps of layers, while `carried` entries pass unchanged.

    The name of a layer is `before` plus its place.
    """
    steps: list[Any] = []
    for k, op in enumerate(ops):
        if isinstance(op, Residual):
            size, size_out = op.shape
            # A residual block begins, maybe its shortcut, and it ends.
            steps.append(_Moves((size, carried), ((0, 1), (2,)), _fork))
            steps += _steps(op.ops, carried + size, f"{before}{k}.")
            if op.shortcut:
                steps.append(_Moves((size_out, size, carried), ((1,), (0,), (2,)), _swap))
                steps += _steps(op.shortcut, carried + size_out, f"{before}{k}.shortcut.")
            steps.append(_Moves((size_out, size_out, carried), ((0,), (0,), (1,)), _join))
        else:
            steps.append(_LayerStep(f"{before}{k}", op, carried))
    return steps
