"""Linear recurrences for PyTorch: the operator ``sparsescan::affine_scan``, and its gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checks import check_flag
from ..errors import InputTypeError
from ..execution.recurrence import Recorded, record_gradients, record_states
from ..kernels.addresses import address_of
from ..locks import new_lock
from ..ops import affine
from ..ops.readings import Reading, read_shapes, read_shapes_anew
from ..recurrent.step_pool import StepPool
from ..symbolic.pattern import Pattern
from .calls.arrays import NUMBERS, array_of, check_tensors, here, tensor_of
from .calls.direct import is_direct, is_mapped, is_transformed, takes_rules
from .calls.once import Mappable, over_maps
from .calls.recorded import ResultTensor, Room, give_scratch, run, take_scratch


def affine_scan(
    matrices: Tensor,
    offsets: Tensor | None = None,
    initial: Tensor | None = None,
    *,
    pattern: Pattern | None = None,
    transposed: bool = False,
) -> Tensor:
    """Return the states of a linear recurrence in the order of time, ``y_t = A_t y_{t-1} + b_t``.

    As :func:`sparsescan.affine_scan`, for tensors of PyTorch, and differentiable any number of
    times in all of them, in both modes, and under the transforms of ``torch.func``. It is one
    operator, registered with ``torch.library``, so that ``torch.compile`` keeps a graph whole.
    Contiguous tensors are not copied, nor are transposed dense matrices in host memory. Tensors on
    a CUDA device are scanned there, on PyTorch's current stream, where CuPy is installed.

    Parameters
    ----------
    matrices : Tensor
        The matrices ``A_1, …, A_T``: dense, ``(T, size, size)`` or ``(T, batch, size, size)``;
        diagonals, ``(T, size)`` or ``(T, batch, size)``; a number for each step, ``(T,)``; values
        in the order of `pattern`, ``(T, nnz)`` or ``(T, batch, nnz)``; or one of these for all
        steps, without the first axis or with one of length one. Samples share matrices without a
        batch axis.
    offsets : Tensor, shape (T, size) or (T, batch, size), optional
        The terms ``b_1, …, b_T``; zeros by default.
    initial : Tensor, shape (size,) or (batch, size), optional
        The state ``y_0``; zeros by default.
    pattern : Pattern, optional
        The pattern of the matrices, if their values are given; or, where shapes leave two readings,
        ``Pattern.diagonal(size)`` for diagonals and ``Pattern.dense((size, size))`` for dense ones.
    transposed : bool, default False
        Whether a step applies ``A_tᵀ`` in place of ``A_t``.

    Returns
    -------
    Tensor, shape (T, size) or (T, batch, size)
        The states ``y_1, …, y_T``.

    Raises
    ------
    InputError
        If a shape or a size is wrong, or if shapes leave two readings.
    InputTypeError
        If a type or a layout is not supported, or dtypes differ. Complex numbers are scanned in
        host memory alone.
    DeviceError
        If the tensors are not all in host memory or on one CUDA device, or that cannot be used.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch import affine_scan
    >>> decay = torch.full((4, 1), 0.5, requires_grad=True)
    >>> y = affine_scan(decay, torch.ones(4, 1))
    >>> y.flatten().tolist()
    [1.0, 1.5, 1.75, 1.875]
    >>> y[-1].backward()
    >>> decay.grad.flatten().tolist()
    [0.0, 0.25, 0.75, 1.75]
    """
    is_own = is_direct(matrices, offsets, initial)
    if is_own:
        call = _known(matrices, offsets, initial, pattern, transposed)
        if isinstance(call, int):
            return _one_step(matrices, offsets, initial)
        if call is not None:
            return _run(call, matrices, offsets, initial, call.pattern, transposed)
    transposed = check_flag("transposed", transposed)
    _check(matrices=matrices, offsets=offsets, initial=initial)
    whole, reading = _read(matrices, offsets, initial, pattern)
    given = whole, offsets, initial
    if is_own:
        # With this pattern it would be read so, too.
        said = pattern if whole is matrices else reading.pattern(pattern)
        own, call = _own(reading, pattern), None
        if whole is matrices and _is_one_step(*given, reading):
            with _lock:
                _recurrences[_key(*given, said, transposed)] = _ONE_STEP
            return _one_step(*given)
        if whole.is_cpu:
            call = _recurrence_of(*given, own, said, transposed)
        return _run(call, *given, own, transposed)
    if is_transformed():
        run: Callable[..., Tensor] = _Transformed.apply if takes_rules(*given) else _by_steps
        return run(*given, _own(reading, pattern), transposed)
    # Compilers do not follow how patterns are made.
    about: _About = reading.kind, None, None, transposed
    if reading.kind == "sparse":
        about = _about(pattern, transposed)
    states: Tensor = _affine_scan(*given, *about)
    return states


def _own(reading: Reading, pattern: Pattern | None) -> Pattern | None:
    """Return the pattern of matrices, if they are not dense."""
    return None if reading.kind == "dense" else reading.pattern(pattern)


def _run(
    call: _Recurrence | None,
    matrices: Tensor,
    offsets: Tensor | None,
    initial: Tensor | None,
    pattern: Pattern | None,
    transposed: bool,
) -> Tensor:
    """Return the states by a recording, or by kernels; with a graph if there is to be one."""
    given = matrices, offsets, initial
    if call is not None and not (
        torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given)
    ):
        return call.states(*given)
    states: Tensor = _Scan.apply(*given, pattern, transposed, call)
    return states


def _check(**tensors: Any) -> None:
    """Raise for what is no tensor that can be scanned, or for tensors that differ in their kind."""
    check_tensors(tensors, ("offsets", "initial"), dtypes=NUMBERS, has_cuda=True)
    matrices = tensors["matrices"]
    if matrices.is_cuda and matrices.is_complex():
        raise InputTypeError(
            f"matrices has dtype {matrices.dtype} on {matrices.device}; expected float32 or "
            "float64 there: complex numbers are scanned on the CPU (matrices.cpu())"
        )


def _shapes_of(
    matrices: Tensor, offsets: Tensor | None, initial: Tensor | None
) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]:
    added, begin = (None if each is None else tuple(each.shape) for each in (offsets, initial))
    return tuple(matrices.shape), added, begin


def _read(
    matrices: Tensor, offsets: Tensor | None, initial: Tensor | None, pattern: Pattern | None
) -> tuple[Tensor, Reading]:
    """Return matrices with an axis of steps and all entries, and what they are."""
    shapes = _shapes_of(matrices, offsets, initial)
    # What remembers earlier answers, a compiler cannot follow.
    read = read_shapes_anew if torch.compiler.is_compiling() else read_shapes
    reading = read(*shapes, pattern)
    if reading.axes != shapes[0]:
        matrices = matrices.reshape(reading.axes)
    if reading.is_number:
        matrices = matrices.expand(reading.shape).contiguous()
    return matrices, reading


# -- The operators ---------------------------------------------------------------------------------

_GIVEN = (
    "Tensor matrices, Tensor? offsets, Tensor? initial, str kind, Tensor? indptr, "
    "Tensor? indices, bool transposed"
)
_library = torch.library.Library("sparsescan", "FRAGMENT")
_library.define(f"affine_scan({_GIVEN}) -> Tensor")
_library.define(
    "affine_scan_backward(Tensor grads, Tensor states, Tensor matrices, Tensor? initial, "
    "str kind, Tensor? indptr, Tensor? indices, bool transposed, bool needs_matrices_grad) "
    "-> Tensor[]"
)
_affine_scan = torch.ops.sparsescan.affine_scan.default
_affine_scan_backward = torch.ops.sparsescan.affine_scan_backward.default


# The kind of matrices, the pattern of sparse ones, and whether steps apply transposed matrices.
_About = tuple[str, Tensor | None, Tensor | None, bool]


def _pattern(about: _About, matrices: Tensor) -> Pattern | None:
    """Return the pattern of matrices; None if they are dense."""
    kind, indptr, indices, _ = about
    if kind == "diagonal":
        return Pattern.diagonal(matrices.shape[-1])
    if indptr is None or indices is None:
        return None
    size = len(indptr) - 1
    return Pattern(indptr.numpy(), indices.numpy(), (size, size))


def _kind_of(pattern: Pattern | None) -> str:
    """Return the kind of matrices, which are dense without a pattern."""
    if pattern is None:
        return "dense"
    return "sparse" if pattern.kind == "general" else "diagonal"


def _about(pattern: Pattern | None, transposed: bool) -> _About:
    """Return a pattern, None for dense matrices, as the operators take it."""
    if pattern is None or pattern.kind != "general":
        return _kind_of(pattern), None, None, transposed
    indptr, indices = (each.astype("int64") for each in (pattern.indptr, pattern.indices))
    return "sparse", torch.from_numpy(indptr), torch.from_numpy(indices), transposed


def _forward(
    matrices: Tensor, offsets: Tensor | None, initial: Tensor | None, *about: Any
) -> Tensor:
    return _scan(matrices, offsets, initial, _pattern(about, matrices), about[-1])


def _scan(
    matrices: Tensor,
    offsets: Tensor | None,
    initial: Tensor | None,
    pattern: Pattern | None,
    transposed: bool,
) -> Tensor:
    with here(matrices):
        given = map(array_of, (matrices, offsets, initial))
        pattern = _pattern_of(matrices, pattern)
        return tensor_of(affine.affine_scan(*given, pattern=pattern, transposed=transposed))


def _pattern_of(matrices: Tensor, pattern: Pattern | None) -> Pattern:
    """Return the pattern of matrices, which are dense without one."""
    if pattern is not None:
        return pattern
    rows, cols = matrices.shape[-2:]
    return Pattern.dense((rows, cols))


def _backward(
    grads: Tensor, states: Tensor, matrices: Tensor, initial: Tensor | None, *about: Any
) -> list[Tensor]:
    """Return the gradients in offsets and initial state, of every sample, and in the matrices."""
    *own, needs_matrices_grad = about
    with here(matrices):
        gradients = affine.affine_scan_vjp(
            array_of(matrices),
            initial=array_of(initial),
            states=array_of(states),
            grads=array_of(grads),
            pattern=_pattern_of(matrices, _pattern(tuple(own), matrices)),
            transposed=own[-1],
            needs_matrices_grad=needs_matrices_grad,
        )
        arrays = [gradients.offsets, gradients.initial]
        if gradients.matrices is not None:
            arrays.append(gradients.matrices)
        return [tensor_of(array) for array in arrays]


def _fake_forward(matrices: Tensor, offsets: Any, initial: Any, *about: Any) -> Tensor:
    kind, indptr, _, _ = about
    size = matrices.shape[-1] if indptr is None else len(indptr) - 1
    steps, *batch = matrices.shape[: -2 if kind == "dense" else -1]
    if offsets is not None:
        steps, *own = offsets.shape[:-1]
        batch = own or batch
    if initial is not None and initial.dim() == 2:
        batch = [initial.shape[0]]
    return matrices.new_empty((steps, *batch, size))


def _fake_backward(grads: Tensor, states: Any, matrices: Tensor, *others: Any) -> list[Tensor]:
    gradients = [grads.new_empty(grads.shape), grads.new_empty(grads.shape[1:])]
    return [*gradients, matrices.new_empty(matrices.shape)] if others[-1] else gradients


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    matrices, offsets, initial, ctx.kind, indptr, indices, ctx.transposed = inputs
    ctx.offsets_dim = None if offsets is None else offsets.dim()
    ctx.pattern, ctx.call = None, None
    ctx.save_for_backward(matrices, initial, indptr, indices, output)


def _differentiate(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
    matrices, initial, indptr, indices, states = ctx.saved_tensors
    needs_matrices = ctx.needs_input_grad[0]
    if ctx.call is not None and not torch.is_grad_enabled() and is_direct(grads):
        gradients = ctx.call.gradients(matrices, initial, states, grads, needs_matrices)
        return (*_shared(ctx, initial, *gradients), None, None, None, None)
    about = ctx.kind, indptr, indices, ctx.transposed
    if ctx.kind == "sparse" and indptr is None:
        about = _about(ctx.pattern, ctx.transposed)
    given = grads, states, matrices, initial
    pattern = _pattern(about, matrices) if ctx.pattern is None else ctx.pattern
    backward = partial(_differentiable_backward, pattern, about)
    if is_mapped(grads):
        gradients = over_maps(backward, given)
    elif torch.is_grad_enabled() or is_transformed():
        gradients = backward(*given)
    else:
        call = _backward if is_direct(*given) else _affine_scan_backward
        gradients = call(*given, *about, needs_matrices)
    in_matrices = gradients[2] if needs_matrices else None
    return (*_shared(ctx, initial, in_matrices, *gradients[:2]), None, None, None, None)


def _shared(
    ctx: Any, initial: Any, in_matrices: Any, in_offsets: Tensor, in_initial: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients that are needed.

    Arguments that samples share get the sum of their gradients.
    """
    _, needs_offsets, needs_initial = ctx.needs_input_grad[:3]
    if needs_offsets and ctx.offsets_dim < in_offsets.dim():
        in_offsets = in_offsets.sum(1)
    if needs_initial and initial.dim() < in_initial.dim():
        in_initial = in_initial.sum(0)
    return in_matrices, in_offsets if needs_offsets else None, in_initial if needs_initial else None


class _Scan(torch.autograd.Function):
    """The operator with its gradients, for calls that nothing else wants to see."""

    @staticmethod
    def forward(
        ctx: Any,
        matrices: Tensor,
        offsets: Tensor | None,
        initial: Tensor | None,
        pattern: Pattern | None,
        transposed: bool,
        call: _Recurrence | None,
    ) -> Tensor:
        if call is None:
            states = _scan(matrices, offsets, initial, pattern, transposed)
        else:
            states = call.states(matrices, offsets, initial)
        # The arrays of a pattern are only needed by what is registered.
        _save(ctx, (matrices, offsets, initial, _kind_of(pattern), None, None, transposed), states)
        ctx.pattern, ctx.call = pattern, call
        return states

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Any:
        return _differentiate(ctx, grads)[:6]


class _Transformed(Mappable):
    """The states, for transforms of ``torch.func`` and forward mode: a map makes more samples."""

    @staticmethod
    def forward(
        matrices: Tensor,
        offsets: Tensor | None,
        initial: Tensor | None,
        pattern: Pattern | None,
        transposed: bool,
    ) -> Tensor:
        return _scan(matrices, offsets, initial, pattern, transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        matrices, offsets, initial, ctx.pattern, ctx.transposed = inputs
        ctx.offsets_dim = None if offsets is None else offsets.dim()
        ctx.save_for_backward(matrices, initial, output)
        ctx.save_for_forward(matrices, initial, output)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Any:
        matrices, initial, states = ctx.saved_tensors
        about = _about(ctx.pattern, ctx.transposed)
        given = grads, states, matrices, initial
        in_offsets, in_initial, in_matrices = _differentiable_backward(ctx.pattern, about, *given)
        return (*_shared(ctx, initial, in_matrices, in_offsets, in_initial), None, None)

    @staticmethod
    def jvp(
        ctx: Any,
        in_matrices: Tensor | None,
        in_offsets: Tensor | None,
        in_initial: Tensor | None,
        *_: Any,
    ) -> Tensor:
        """Return ``ẏ_t = A_t ẏ_{t-1} + (Ȧ_t y_{t-1} + ḃ_t)``, which is a recurrence, too."""
        matrices, initial, states = ctx.saved_tensors
        added = torch.zeros_like(states)
        if in_offsets is not None:
            wide = in_offsets.dim() == states.dim()
            added = added + (in_offsets if wide else in_offsets.unsqueeze(1))
        if in_matrices is not None and len(states):
            before = _before(initial, states)
            added = added + _applied(in_matrices, before, ctx.pattern, ctx.transposed)
        slope: Tensor = _Transformed.apply(matrices, added, in_initial, ctx.pattern, ctx.transposed)
        return slope

    @staticmethod
    def vmap(
        info: Any,
        dims: Any,
        matrices: Tensor,
        offsets: Tensor | None,
        initial: Tensor | None,
        pattern: Pattern | None,
        transposed: bool,
    ) -> tuple[Tensor, int]:
        count, own = info.batch_size, 2 if pattern is None else 1
        given = (matrices, 1, own), (offsets, 1, 1), (initial, 0, 1)
        batch = next(
            (
                each.shape[lead + (dim is not None and dim <= lead)]
                for (each, lead, rest), dim in zip(given, dims, strict=False)
                if each is not None and each.dim() - (dim is not None) > lead + rest
            ),
            None,
        )
        folded = [
            _folded(each, dim, lead, lead + rest, count, batch)
            for (each, lead, rest), dim in zip(given, dims, strict=False)
        ]
        states = _Transformed.apply(*folded, pattern, transposed)
        return (states if batch is None else states.unflatten(1, (count, batch))), 1


def _folded(
    each: Tensor | None, dim: int | None, lead: int, least: int, count: int, batch: int | None
) -> Tensor | None:
    """Return an argument whose samples are those of all maps, unless all of them share it.

    Samples come behind `lead` axes, and without samples there are `least` axes.
    """
    if each is None:
        return None
    has_batch = each.dim() - (dim is not None) > least
    if dim is None:
        if not has_batch:
            return each
        each = each.unsqueeze(lead).expand(*each.shape[:lead], count, *each.shape[lead:])
    else:
        each = each.movedim(dim, lead)
    if batch is None:
        return each
    if not has_batch:
        each = each.unsqueeze(lead + 1)
        each = each.expand(*each.shape[: lead + 1], batch, *each.shape[lead + 2 :])
    return each.flatten(lead, lead + 1)


def _rows(indptr: Tensor, indices: Tensor) -> Tensor:
    """Return the row of each entry of a pattern."""
    return torch.repeat_interleave(indptr.diff(), output_size=len(indices))


def _applied(
    matrices: Tensor, vectors: Tensor, pattern: Pattern | None, transposed: bool
) -> Tensor:
    """Return products of matrices, or of values on a pattern, and vectors."""
    wide = vectors.dim() > matrices.dim() - (1 if pattern is None else 0)
    if wide:
        matrices = matrices.unsqueeze(1)
    if pattern is None:
        matrices = matrices.mT if transposed else matrices
        return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)
    if pattern.kind == "diagonal":
        return matrices * vectors
    _, indptr, indices, _ = _about(pattern, transposed)
    assert indptr is not None
    assert indices is not None
    rows = _rows(indptr, indices)
    to, read = (indices, rows) if transposed else (rows, indices)
    products = matrices * vectors[..., read]
    return torch.zeros_like(vectors).index_add(-1, to, products)


def _by_steps(
    matrices: Tensor,
    offsets: Tensor | None,
    initial: Tensor | None,
    pattern: Pattern | None,
    transposed: bool,
) -> Tensor:
    """Return the states step by step, by PyTorch's own operations."""
    reading = read_shapes(*_shapes_of(matrices, offsets, initial), _pattern_of(matrices, pattern))
    y = matrices.new_zeros(*reading.batch, reading.size)
    y = y if initial is None else y + initial
    states = []
    for t in range(reading.steps):
        matrix = matrices if len(matrices) == 1 else matrices[t : t + 1]
        y = _applied(matrix, y[None], pattern, transposed)[0]
        y = y if offsets is None else y + offsets[t]
        states.append(y)
    return torch.stack(states) if states else y.expand(0, *y.shape)


def _before(initial: Tensor | None, states: Tensor) -> Tensor:
    """Return the state before each step."""
    begin = states.new_zeros(states.shape[1:]) if initial is None else initial
    return torch.cat([begin.expand(states.shape[1:])[None], states[:-1]])


def _differentiable_backward(
    pattern: Pattern | None,
    about: _About,
    grads: Tensor,
    states: Tensor,
    matrices: Tensor,
    initial: Tensor | None,
) -> list[Tensor]:
    """Return what the operator for backward does, by functions that have derivatives.

    `pattern` is only needed under transforms.
    """
    kind, indptr, indices, transposed = about
    if not len(grads):
        return [grads, grads.new_zeros(grads.shape[1:]), torch.zeros_like(matrices)]
    later = torch.cat([grads[:-1].flip(0), torch.zeros_like(grads[:1])])
    given = matrices.flip(0).conj(), later, grads[-1]
    if is_transformed():
        back: Tensor = _Transformed.apply(*given, pattern, not transposed)
    else:
        back = _affine_scan(*given, kind, indptr, indices, not transposed)
    in_offsets = torch.cat([back[:-1].flip(0), grads[-1:]])
    before = _before(initial, states).conj()
    left, right = (before, in_offsets) if transposed else (in_offsets, before)
    if kind == "dense":
        in_matrices = left[..., :, None] * right[..., None, :]
    elif indptr is None or indices is None:
        in_matrices = left * right
    else:
        rows = _rows(indptr, indices)
        in_matrices = left[..., rows] * right[..., indices]
    if in_matrices.dim() > matrices.dim():
        in_matrices = in_matrices.sum(1)
    if len(matrices) < len(in_matrices):
        in_matrices = in_matrices.sum(0, keepdim=True)
    return [in_offsets, back[-1], in_matrices]


# -- Recordings ------------------------------------------------------------------------------------

# Calls of some shapes before they are recorded, which takes as long as a few, and recordings.
_OFTEN, _MOST = 4, 64
_recurrences: OrderedDict[Any, _Recurrence | int] = OrderedDict()
_ONE_STEP = -1  # beside recordings, and counts of calls
_lock = new_lock()


def _is_one_step(
    matrices: Tensor, offsets: Tensor | None, initial: Tensor | None, reading: Reading
) -> bool:
    """Return whether a scan is one step with diagonals, which PyTorch computes in less time."""
    if offsets is None or initial is None or not matrices.is_cpu:
        return False
    return reading.kind == "diagonal" and len(matrices) == len(offsets) == 1


def _one_step(matrices: Tensor, offsets: Any, initial: Any) -> Tensor:
    return torch.addcmul(offsets, matrices, initial.unsqueeze(0))


class _Recurrence:
    """Both passes of a recurrence, for contiguous tensors of some shapes in host memory.

    Attributes
    ----------
    pattern : Pattern or None
        The pattern of the matrices; None if they are dense.
    """

    def __init__(
        self, pattern: Pattern | None, transposed: bool, dtype: torch.dtype, shapes: tuple[Any, ...]
    ) -> None:
        self.pattern = pattern
        matrices, self._offsets, self._initial = shapes
        self._values = tuple(matrices)
        if pattern is None:  # dense: the values are the matrices' own
            pattern = Pattern.dense(tuple(matrices[-2:]))
            self._values = (*matrices[:-2], pattern.nnz)
        self._about, self._dtype, self._shape = (pattern, transposed), dtype, matrices
        self._name = str(dtype)[6:]
        self._states = record_states(
            pattern, transposed, self._values, self._offsets, self._initial, self._name
        )
        self._result = ResultTensor.of(self._states.recording.results[0], dtype)
        self._gradients: dict[bool, tuple[Recorded, list[ResultTensor]]] = {}
        self._rooms = StepPool(partial(Room, 0))

    def _run(
        self, recorded: Recorded, given: list[Tensor], results: list[ResultTensor]
    ) -> list[Tensor]:
        room, scratch = self._rooms.take(), take_scratch(recorded.nbytes)
        tensors = [each.new(room) for each in results]
        run(recorded.recording, [address_of(scratch)], given, tensors)
        give_scratch(scratch)
        self._rooms.give_back(room)
        return tensors

    def states(self, matrices: Tensor, offsets: Tensor | None, initial: Tensor | None) -> Tensor:
        """Return the states of all steps."""
        given = [each for each in (matrices, offsets, initial) if each is not None]
        return self._run(self._states, given, [self._result])[0]

    def gradients(
        self,
        matrices: Tensor,
        initial: Tensor | None,
        states: Tensor,
        grads: Tensor,
        needs_matrices: bool,
    ) -> list[Tensor | None]:
        """Return those in matrices, if they are needed, in offsets, and in the initial state."""
        own = self._gradients.get(needs_matrices)
        if own is None:
            size = states.shape[-1:]
            begin = (self._initial or tuple(size)) if needs_matrices else None
            shape = tuple(states.shape)
            recorded = record_gradients(*self._about, self._values, shape, begin, self._name)
            results = [ResultTensor.of(each, self._dtype) for each in recorded.recording.results]
            own = self._gradients[needs_matrices] = recorded, results
        given = [matrices, grads.resolve_conj().resolve_neg().contiguous()]
        if needs_matrices:
            begin = states.new_zeros(states.shape[-1:]) if initial is None else initial
            given += [begin, states]
        found: list[Tensor | None] = [*self._run(own[0], given, own[1])]
        if not needs_matrices:
            return [None, *found]
        assert found[0] is not None
        return [found[0].view(self._shape), *found[1:]]


def _key(
    matrices: Tensor,
    offsets: Tensor | None,
    initial: Tensor | None,
    pattern: Pattern | None,
    transposed: bool,
) -> Any:
    """Return what a recording is found by: all that is read of the arguments but numbers."""
    given = matrices, offsets, initial
    about = [
        None if each is None else (each.shape, each.dtype, each.layout, each.is_cpu)
        for each in given
    ]
    return *about, pattern, transposed


def _known(
    matrices: Tensor,
    offsets: Tensor | None,
    initial: Tensor | None,
    pattern: Pattern | None,
    transposed: bool,
) -> _Recurrence | int | None:
    """Return what is recorded for such arguments, which then need no check; or `_ONE_STEP`."""
    if type(transposed) is not bool or not (pattern is None or type(pattern) is Pattern):
        return None
    found = _recurrences.get(_key(matrices, offsets, initial, pattern, transposed))
    if isinstance(found, int):
        return found if found == _ONE_STEP else None
    is_known = found is not None and _are_plain(matrices, offsets, initial)
    return found if is_known else None


def _recurrence_of(
    matrices: Tensor,
    offsets: Tensor | None,
    initial: Tensor | None,
    pattern: Pattern | None,
    said: Pattern | None,
    transposed: bool,
) -> _Recurrence | None:
    """Return what is recorded for such tensors, once they have come a few times.

    `said` is the pattern that the next call is to come with.
    """
    key = _key(matrices, offsets, initial, said, transposed)
    found = _recurrences.get(key, 0)
    if isinstance(found, int):
        with _lock:
            _recurrences[key] = found + 1
            if found >= _OFTEN:
                shapes = tuple(
                    None if each is None else each.shape for each in (matrices, offsets, initial)
                )
                _recurrences[key] = _Recurrence(pattern, transposed, matrices.dtype, shapes)
            while len(_recurrences) > _MOST:
                _recurrences.popitem(last=False)
        return None
    return found if _are_plain(matrices, offsets, initial) else None


def _are_plain(*tensors: Tensor | None) -> bool:
    """Return whether the memory of tensors is all that there is of them, in one piece each."""
    return all(
        each is None or (each.is_contiguous() and not each.is_conj() and not each.is_neg())
        for each in tensors
    )


for _kind in ("CPU", "CUDA"):
    _library.impl("affine_scan", _forward, _kind)
    _library.impl("affine_scan_backward", _backward, _kind)
torch.library.register_fake("sparsescan::affine_scan", _fake_forward, lib=_library)
torch.library.register_fake("sparsescan::affine_scan_backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    "sparsescan::affine_scan", _differentiate, setup_context=_save, lib=_library
)
