"""Modules of whole sequences: the base of PyTorch's replacements and of modules of any cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from ...checks import check_has_shape
from ...errors import InputError, InputTypeError, short
from ...recurrent.arguments import (
    DEFAULTS,
    Options,
    Returned,
    check_has_resets,
    check_input,
    check_option,
)
from ...recurrent.definition import Mask, StepNumber
from ...recurrent.further import Further, check_known, columns_of
from ...recurrent.initial import Begins, initial_states
from ..binder import FUNCTIONS
from ..conversion.structure import is_pruning
from .derivatives import run_differentiable
from .direct import as_leaf, is_exported_to_onnx, is_recorded, is_transformed
from .plain import dropped
from .prepared import find, is_left, key_of, leave, left_key, prepare
from .projected import mode_of, projected
from .recurrent_op import has_kernels, run
from .resets import check_resets
from .shapes import Shape, names_of
from .states import apart, beside, joined

_DTYPES = (torch.float32, torch.float64)
# From this many steps on, kernels compute projections.
_PROJECTED_STEPS = 8

Some = Tensor | None
Run = Callable[[Tensor, Some, Some, list[Tensor], Some], tuple[Tensor, Tensor]]


class Sequences:
    """The forward pass of a recurrent module, with the attributes of :class:`torch.nn.RNNBase`.

    Attributes
    ----------
    mode : str
        The operators' name for its cells.
    states : int
        The number of a cell's states; with several, calls take and return a tuple of tensors.
    memory_limit : int or None
        Bytes that a call may keep for its backward pass, without input and output; None, the
        default, means no limit. The backward pass recomputes gates that do not fit.
    truncate : int or None
        Steps of a segment; gradients flow at most to the previous segment. None, the default, means
        that they flow through all steps.
    return_states : bool or "layers"
        Whether a call also returns the states of all steps, and of all layers.
    """

    _theirs: ClassVar[Any] = None
    mode: str
    states: int
    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    proj_size: int = 0
    dropout: float
    bidirectional: bool
    training: bool
    all_weights: Any
    _names: list[list[str]]
    permute_hidden: Any
    _buffers: dict[str, Any]
    _parameters: dict[str, Any]
    _modules: dict[str, Any]
    _flat_weights: list[Any]
    _flat_weights_names: list[str]
    _update_flat_weights: Any
    _forward_pre_hooks: Any

    memory_limit: int | None
    truncate: int | None
    return_states: Returned

    _options = DEFAULTS
    _further: Sequence[Further] = ()
    _begins: Begins | None = None

    def _set_options(self, given: dict[str, Any]) -> None:
        for name, value in given.items():
            setattr(self, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        # Modules pickled by version 0.2 have one attribute per option.
        names = [name for name in Options._fields if f"_{name}" in vars(self)]
        self._set_options({name: vars(self).pop(f"_{name}") for name in names})

    @property
    def is_usual(self) -> bool:
        """Whether calls are like those of PyTorch's modules, apart from resets."""
        options = self._options
        return options == DEFAULTS or (
            not torch.is_grad_enabled() and options.unbounded() == DEFAULTS
        )

    def forward(
        self,
        input: Any,  # noqa: A002, PyTorch's name
        hx: Any = None,
        *,
        resets: Any = None,
        reset_states: Any = None,
        **further: Any,
    ) -> Any:
        """Run whole sequences, with the arguments and results of PyTorch's modules.

        Parameters
        ----------
        input : Tensor or PackedSequence
            The inputs, in any form that PyTorch's modules accept.
        hx : Tensor or tuple of Tensor, optional
            The initial states, by default zeros, or parameters (:class:`.Initial`).
        resets : Tensor of bool or PackedSequence, optional
            True at a step before which states are set to zero. It has the shape of `input` without
            the last axis, or with a last axis of 1, or is packed like `input`.
        reset_states : Tensor or tuple of Tensor, optional
            The states that `resets` set, in the form of `hx`; the defaults are those of `hx`.
        **further : Tensor or PackedSequence
            The further inputs of cells that declare them (:class:`.Given`), with names formed like
            those of parameters, such as ``drive_l0``. Each has a shape that broadcasts to that of
            `input`, with units in the last axis, or is packed like it. In training mode the module
            draws random masks (:class:`.Mask`), unless you pass them. It draws the masks of a step
            as :func:`torch.nn.functional.dropout` does for ones of that shape, in the order of
            layers, directions and declarations.

        Returns
        -------
        output : Tensor or PackedSequence
            The outputs of the last layer.
        hx : Tensor or tuple of Tensor
            The last states.
        states : Tensor, PackedSequence or tuple of these
            Only with `return_states`: the states of the last layer after each step, in the form of
            `output`; several states are a tuple, ``(h, c)`` for an LSTM. The first state is
            `output`. With ``"layers"``, the states of all layers, each
            ``(…, layers · directions, hidden_size)``: ``h[..., k, :]`` are the states whose last is
            ``h_n[k]``.

        Raises
        ------
        InputError, InputTypeError
            If resets have a wrong shape or are not bools; if there are `reset_states` without
            resets; or if `truncate` is set and the module has two directions or dropout between
            layers, or no kernels run.
        MemoryLimitError
            If a call needs more than `memory_limit`.
        """
        key = left = None
        check_known(self._further, further)
        if reset_states is not None:
            check_has_resets(resets)
        if self._begins is not None and not isinstance(input, Proxy):
            begin = self._begun(input)
            hx = begin if hx is None else hx
            reset_states = begin if resets is not None and reset_states is None else reset_states
        if (
            resets is None
            and not self._further
            and self.is_usual
            and not torch.compiler.is_compiling()
        ):
            if self._theirs is not None:
                left = left_key(self, input, hx)
                if is_left(left):
                    return self._theirs.forward(self, input, hx)
            own: list[Any] = list(map(self._parameters.get, self._flat_weights_names))
            key = key_of(self, input, hx, own)
        if key is not None:
            results = self._called(find(key), input, hx, own, left)
            if results is not None:
                return results
        elif (leaf := as_leaf(self, input, *([] if hx is None else [hx]))) is not None:
            return leaf
        # Weights that are recomputed at each read are read only once the kernel is chosen.
        is_made = self._theirs is not None and "parametrizations" in self._modules
        weights: list[Tensor] = list(self._flat_weights) if is_made else self._weights()
        is_taken = self._takes(input, hx, weights)
        if is_taken and reset_states is not None:
            is_taken = self._takes(input, reset_states, weights)
        if self.truncate is not None and torch.is_grad_enabled():
            is_empty = isinstance(input, Tensor) and 0 in input.shape
            self._check_truncated(has_kernels=(is_taken or is_empty) and not is_recorded())
        is_differentiable = is_taken and is_transformed() and weights[0].is_cpu
        if not is_differentiable and (is_recorded() or not is_taken or is_exported_to_onnx()):
            return self._without_kernels(input, hx, resets, reset_states, **further)
        weights = self._weights() if is_made else weights
        if is_differentiable:
            return self._differentiably(input, hx, weights, resets, reset_states, further)
        if resets is not None:
            resets = check_resets(resets, input)
        if key is not None:
            call = prepare(key, may_be_theirs=self._theirs is not None)
            results = self._called(call, input, hx, own, left)
            if results is not None:
                return results
        return self._whole(input, hx, weights, self._run, resets, reset_states, further)

    def stream(self, batch: int = 1) -> Any:
        """Return what :func:`sparsescan.torch.stream` does."""
        from ..streams import stream

        return stream(self, batch)  # type: ignore[arg-type]

    def _begun(self, given: Any) -> Any:
        """Return the initial states that are parameters, in the form of ``hx``."""
        assert self._begins is not None
        self._check(given, None)
        params = [
            {name.rpartition("_l")[0]: getattr(self, name) for name in names}
            for names in self._names
        ]
        shape = self._state_shapes(given)[0][1:]
        states = initial_states(torch, self._begins, self.states, params, shape)
        return apart(states, self.states) if self.states > 1 else states

    def _called(self, call: Any, given: Any, hx: Any, weights: list[Any], left: Any) -> Any:
        """Return the results of a prepared call or of PyTorch's kernel; None if neither runs."""
        if call is True:
            leave(left)
            return self._theirs.forward(self, given, hx)
        return call(given, hx, weights) if call and call.takes(hx, weights) else None

    def _weights(self) -> list[Tensor]:
        """Return the parameters of each direction of each layer."""
        return [weight for each in self.all_weights for weight in each]

    def _without_kernels(
        self, given: Any, hx: Any, resets: Any = None, reset_states: Any = None, **further: Any
    ) -> Any:
        """Compute, or refuse, calls that have no kernels."""
        raise NotImplementedError

    def _whole(
        self,
        given: Any,
        hx: Any,
        weights: list[Tensor],
        run: Run,
        resets: Any,
        reset_states: Any,
        further: Mapping[str, Any],
    ) -> Any:
        """Return the results for any form of input, by a function for batches of samples."""
        if self._further:
            given = self._widened(given, further)
        if self._is_short:
            run = projected(run, self)
        if reset_states is not None:
            hx = beside(hx, reset_states)
        if isinstance(given, PackedSequence):
            return self._packed(given, hx, weights, run, resets)
        is_batched = given.dim() == 3
        x = given if is_batched else given.unsqueeze(1)
        flags = resets if resets is None or is_batched else resets.unsqueeze(1)
        if self.batch_first and is_batched:
            x, flags = x.transpose(0, 1), None if flags is None else flags.transpose(0, 1)
        state = None if hx is None else joined(hx)
        if state is not None and not is_batched:
            state = state.unsqueeze(1)
        output, last = run(x, state, None, weights, flags)
        outputs = self._outputs(output)
        if not is_batched:
            outputs, last = [each.squeeze(1) for each in outputs], last.squeeze(1)
        elif self.batch_first:
            # A view cannot be detached in place, nor can anything in forward mode.
            turn = Tensor.transpose if is_transformed() else Tensor.transpose_
            outputs = [turn(each, 0, 1) for each in outputs]
        return self._results(outputs, self._parted(last))

    def _widened(self, given: Any, further: Mapping[str, Any]) -> Any:
        """Return an input with further inputs appended, in the same form."""
        is_packed = isinstance(given, PackedSequence)
        x = given.data if is_packed else given
        arrays = {name: each.data if is_packed else each for name, each in further.items()}
        for name, each in further.items():
            if not isinstance(each, PackedSequence if is_packed else Tensor):
                raise InputTypeError(
                    f"{name} is {short(each)}; expected a {type(given).__name__}, as input"
                )
        time = self.batch_first and given.dim() == 3 if not is_packed else 0
        samples = _samples_of(given) if is_packed else None
        for name, declared, _ in self._further if is_packed else ():
            if isinstance(declared, StepNumber):
                numbers = torch.arange(len(given.batch_sizes)).repeat_interleave(given.batch_sizes)
                arrays.setdefault(name, numbers.to(x)[:, None])

        def draw(mask: Mask, p: float, shape: Any) -> Tensor:
            once = samples is not None and mask.per == "sequence"
            own = (int(given.batch_sizes[0]), shape[-1]) if once else shape
            drawn = functional.dropout(x.new_ones(own), p)
            drawn = drawn if mask.scaled else (drawn != 0).to(x.dtype)
            return drawn if samples is None or not once else drawn.index_select(0, samples)

        shape = *x.shape[:-1], self.hidden_size
        about = x, self._further, arrays, shape, draw if self.training else None
        columns = columns_of(FUNCTIONS, *about, -1 if is_packed else int(time))
        whole = torch.cat([x, *columns], -1)
        return given._replace(data=whole) if is_packed else whole

    def _outputs(self, output: Tensor) -> list[Tensor]:
        """Return the outputs of a module, each in its own memory, from the outputs of its cells.

        These are the returned states; for all layers, after the first state of the last layer.
        """
        returns = self._options.of_cells(self.states).return_states
        states = list(apart(output, self.states)) if returns else [output]
        if self._is_short:
            columns = -1 if returns == "layers" else 1 + self.bidirectional
            states = [
                each.unflatten(-1, (columns, self.hidden_size))[..., :size].flatten(-2).contiguous()
                for each, size in zip(states, self._sizes, strict=False)
            ]
        if returns == "layers":
            last = states[0][..., -1 - self.bidirectional :, :].flatten(-2)
            states.insert(0, last.clone(memory_format=torch.contiguous_format))
        return states

    def _results(self, outputs: list[Any], last: Any) -> Any:
        """Return the results of a call."""
        if not self.return_states:
            return outputs[0], last
        states = tuple(outputs[self.return_states == "layers" :])
        return outputs[0], last, states if self.states > 1 else states[0]

    def _check_truncated(self, *, has_kernels: bool) -> None:
        """Raise unless gradients can be truncated."""
        if self.bidirectional:
            why = "bidirectional is True: segments of both directions would not be the same"
        elif self.dropout > 0 and self.training and self.num_layers > 1:
            why = f"dropout is {self.dropout}: layers run one by one"
        elif not has_kernels:
            why = "this input, or a transform of it, has no kernel"
        else:
            return
        raise InputError(f"truncate is {self.truncate}; expected None, as {why}")

    def _takes(self, given: Any, hx: Any, weights: list[Tensor]) -> bool:
        """Return whether there are kernels for a call."""
        is_packed = isinstance(given, PackedSequence)
        x = given.data if is_packed else given
        states = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
        options = self._options.of_cells(self.states)
        is_cut = options.truncate is not None and torch.is_grad_enabled()
        if (
            (self.proj_size and not self._takes_projections(given, x))
            or (hx is not None and len(states) != self.states)
            or not all(isinstance(each, Tensor) for each in (x, *states))
            or x.dtype not in _DTYPES
            or ((is_cut or options.return_states) and x.device.type != "cpu")
            or any(each.dtype != x.dtype or each.device != x.device for each in (*states, *weights))
            or not has_kernels(self._mode_of_cells(), self.hidden_size, x, bool(self.bias))
            or torch.is_autocast_enabled(x.device.type)
            or x.dim() not in ((2,) if is_packed else (2, 3))
            or x.shape[-1] != self.input_size
            or 0 in x.shape
        ):
            return False
        expected = self._state_shapes(given)
        return [tuple(each.shape) for each in states] == expected[: len(states)]

    def _mode_of_cells(self) -> str:
        """Return the operators' name for the cells that run in place of this module's."""
        return mode_of(self.proj_size, bool(self.bias)) if self.proj_size else self.mode

    def _takes_projections(self, given: Any, x: Tensor) -> bool:
        """Return whether kernels compute projections.

        PyTorch computes them with dropout between layers, under `torch.compile`, and for a few
        steps, where it is faster.
        """
        has_dropout = self.dropout > 0 and self.training and self.num_layers > 1
        is_compiling = torch.compiler.is_compiling()
        if has_dropout or is_compiling or self.return_states or x.device.type != "cpu":
            return False
        if isinstance(given, PackedSequence):
            steps = len(given.batch_sizes)
        else:
            steps = x.shape[1 if self.batch_first and x.dim() == 3 else 0]
        return not self.is_usual or steps >= _PROJECTED_STEPS

    def _state_shapes(self, given: Any) -> list[tuple[int, ...]]:
        """Return the shapes of the states for an input."""
        batch: tuple[int, ...] = ()
        if isinstance(given, PackedSequence):
            batch = (int(given.batch_sizes[0]),)
        elif given.dim() == 3:
            batch = (given.shape[0 if self.batch_first else 1],)
        rows = self.num_layers * (1 + self.bidirectional)
        return [(rows, *batch, size) for size in self._sizes]

    @property
    def _sizes(self) -> list[int]:
        """The size of each state."""
        return [self.proj_size or self.hidden_size, *[self.hidden_size] * (self.states - 1)]

    @property
    def _is_short(self) -> bool:
        """Whether a state has fewer numbers than there are units."""
        return self.proj_size > 0

    def _parted(self, last: Tensor) -> Any:
        """Return the last states in PyTorch's form: several states as a tuple."""
        if self._is_short:
            parts = last.split(self.hidden_size, -1)
            found = tuple(
                each[..., :size].clone(memory_format=torch.contiguous_format)
                for each, size in zip(parts, self._sizes, strict=True)
            )
            return found if self.states > 1 else found[0]
        return apart(last, self.states) if self.states > 1 else last

    def _packed(
        self, given: PackedSequence, hx: Any, weights: list[Tensor], run: Run, resets: Any
    ) -> Any:
        """Run samples of different lengths, which are sorted and packed step by step."""
        data, sizes, order, back = given  # sizes are on the CPU
        steps, batch = len(sizes), int(sizes[0])
        has = sizes[:, None] > torch.arange(batch)
        places = torch.nonzero_static(has.flatten(), size=len(data))[:, 0].to(data.device)
        x = data.new_zeros(steps * batch, data.shape[1]).index_copy(0, places, data)
        state = None if hx is None else joined(self.permute_hidden(hx, order))
        flags = None
        if resets is not None:
            none = resets.data.new_zeros(steps * batch)
            flags = none.index_copy(0, places, resets.data).reshape(steps, batch)
        output, last = run(x.reshape(steps, batch, -1), state, has.sum(0), weights, flags)
        rows = output.flatten(0, 1).index_select(0, places)
        states = self.permute_hidden(self._parted(last), back)
        outputs = [PackedSequence(each, sizes, order, back) for each in self._outputs(rows)]
        return self._results(outputs, states)

    def _masks(self, weights: list[Tensor]) -> list[Tensor | None]:
        """Return the masks of pruned matrices, or None for others; [] if nothing is pruned.

        Masks only say where weights are 0. With hooks other than pruning's, weights may be
        anything.
        """
        hooks: Any = self._forward_pre_hooks.values()
        if self._is_short or not hooks or not all(map(is_pruning, hooks)):
            return []
        pruned, buffers = {hook._tensor_name for hook in hooks}, self._buffers
        names = names_of(self.mode, self.num_layers, bool(self.bias), bool(self.bidirectional))
        masks = [buffers.get(f"{name}_mask") if name in pruned else None for name in names]
        return [
            mask if mask is not None and weight.dim() == 2 and mask.shape == weight.shape else None
            for mask, weight in zip(masks, weights, strict=True)
        ]

    def _run(
        self,
        x: Tensor,
        state: Tensor | None,
        lengths: Tensor | None,
        weights: list[Tensor],
        resets: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run all layers at once, or one by one if there is dropout between them."""
        flags = bool(self.bias), bool(self.bidirectional)
        masks = self._masks(weights)
        calls = self.num_layers if self.dropout > 0 and self.training else 1
        width, states = len(weights) // calls, 0 if state is None else len(state) // calls
        options = self._options.of_cells(self.states)
        lasts, every, is_whole = [], [], options.return_states == "layers"
        own_size = (x.shape[-1] - self.input_size) // calls
        x, columns = x[..., : x.shape[-1] - calls * own_size], x
        for call in range(calls):
            if own_size:
                begin_at = self.input_size + call * own_size
                x = torch.cat([x, columns[..., begin_at : begin_at + own_size]], -1)
            own = slice(call * width, (call + 1) * width)
            begin = None if state is None else state[call * states : (call + 1) * states]
            given = [x, *weights[own], *([] if begin is None else [begin])]
            keeps = torch.is_grad_enabled() and any(each.requires_grad for each in given)
            of_call = options if keeps else options.unbounded()
            if not is_whole and call + 1 < calls:
                of_call = of_call._replace(return_states=False)
            x, last, _ = run(
                *(
                    x,
                    begin,
                    lengths,
                    weights[own],
                    masks[own],
                    self._mode_of_cells(),
                    self.hidden_size,
                ),
                *(self.num_layers // calls, *flags, of_call.encode(), keeps),
                resets=resets,
            )
            lasts.append(last)
            if call + 1 < calls:
                if is_whole:
                    every.append(x)
                    x = x[..., : self.hidden_size].flatten(-2)
                x = dropped(x, self.dropout, lengths)
        if calls == 1:
            return x, lasts[0]
        return torch.cat([*every, x], -2) if every else x, torch.cat(lasts)

    def _check(self, given: Any, hx: Any, name: str = "hx") -> None:
        """Raise unless an input and states have the shapes of this module."""
        is_packed = isinstance(given, PackedSequence)
        x = given.data if is_packed else given
        if not isinstance(x, Tensor):
            raise InputTypeError(f"input is {short(given)}; expected a tensor or a PackedSequence")
        axes = ("rows",) if is_packed else ("batch, T" if self.batch_first else "T, batch", "T")
        check_input("input.data" if is_packed else "input", x, self.input_size, *axes)
        if hx is None:
            return
        shapes = self._state_shapes(given)
        states = hx if isinstance(hx, tuple) else (hx,)
        if len(states) != self.states:
            many = f"a tuple of {self.states} tensors" if self.states > 1 else "a tensor"
            raise InputTypeError(f"{name} is {short(hx)}; expected {many} of shape {shapes[0]}")
        for each, expected in zip(states, shapes, strict=True):
            if not isinstance(each, Tensor):
                raise InputTypeError(
                    f"{name} has {short(each)}; expected a tensor of shape {expected}"
                )
            check_has_shape(f"a state of {name}", each, expected)

    def _differentiably(
        self,
        given: Any,
        hx: Any,
        weights: list[Tensor],
        resets: Any,
        reset_states: Any,
        further: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Run all layers by functions that support transforms and any dtype and device."""
        self._check(given, hx)
        self._check(given, reset_states, "reset_states")
        if resets is not None:
            resets = check_resets(resets, given)
        about = weights, self._run_differentiable, resets, reset_states
        return self._whole(given, hx, *about, further)

    def _run_differentiable(
        self,
        x: Tensor,
        state: Tensor | None,
        lengths: Tensor | None,
        weights: list[Tensor],
        resets: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Do :meth:`_differentiably` for all layers at once."""
        about = self._mode_of_cells(), self.hidden_size, self.num_layers
        flags = bool(self.bias), bool(self.bidirectional)
        options = self._options.unbounded().of_cells(self.states)
        shape = Shape.of(x, (*about, *flags, options.encode()))
        if state is None:
            rows = shape.num_layers * shape.directions
            state = x.new_zeros((rows, x.shape[1], shape.state_size))
        dropout = self.dropout if self.training else 0.0
        return run_differentiable(shape, x, state, weights, lengths, resets, dropout)


def _samples_of(given: PackedSequence) -> Tensor:
    """Return, for each row, the place of its sample among the samples of the first step."""
    has = given.batch_sizes[:, None] > torch.arange(int(given.batch_sizes[0]))
    places = torch.nonzero_static(has, size=len(given.data))[:, 1]
    return places.to(given.data.device)


def _option(name: str) -> property:
    """Return the property of modules for one of the options, which checks new values."""

    def read(self: Any) -> Any:
        return getattr(self._options, name)

    def write(self: Any, value: Any) -> None:
        self._options = self._options._replace(**{name: check_option(name, value)})

    return property(read, write)


for _name in Options._fields:
    setattr(Sequences, _name, _option(_name))
