"""Layers of torchrecurrent that run whole sequences in kernels."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import InputError, short
from ...graph.expressions import topological
from ...recurrent import Cell, catalogue
from ...recurrent.arguments import DEFAULTS
from ...recurrent.definition import read_options, shapes_of
from ..calls.direct import is_watched
from ..calls.prepared import run_prepared
from ..calls.recurrent_op import has_kernels, run
from ..calls.resets import check_resets
from ..calls.shapes import kind_of, register
from ..calls.states import apart, joined
from ..calls.times import Seconds
from .kinds import Kind
from .structure import is_pruning, is_seen

_VERSION = "0.2.5"
_DTYPES = (torch.float32, torch.float64)
# Modules that compute a known function, with the settings that this requires.
_ACTIVATIONS: dict[type[Any], tuple[str, dict[str, Any]]] = {
    nn.Tanh: ("tanh", {}),
    nn.ReLU: ("relu", {"inplace": False}),
    nn.Sigmoid: ("sigmoid", {}),
    nn.Hardsigmoid: ("hardsigmoid", {"inplace": False}),
    nn.Softplus: ("softplus", {"beta": 1.0, "threshold": 20.0}),
    nn.ELU: ("elu", {"alpha": 1.0, "inplace": False}),
    nn.LeakyReLU: ("leaky_relu", {"negative_slope": 0.01, "inplace": False}),
    nn.SiLU: ("silu", {"inplace": False}),
    nn.Identity: ("identity", {}),
}


class _Form(NamedTuple):
    """How the states of a torchrecurrent layer correspond to those of our cell.

    Attributes
    ----------
    states : tuple of int
        Which of our states the layer takes and returns; the others begin with zeros.
    options : dict of str to str
        Options of our cell that the layer has no names for.
    keeps_input : bool
        Whether its second state is the last input of each layer; our cell keeps products of it.
    """

    states: tuple[int, ...]
    options: Mapping[str, Any] = {}
    keeps_input: bool = False


_FORMS = {
    "IntersectionRNN": _Form((1,)),
    "JANET": _Form((0, 0)),
    "LEM": _Form((0, 1), {"memory": "old"}),
    "MCLSTM": _Form((1, 2)),
    "NAS": _Form((0, 1), {"join": "sum"}),
    "SCRN": _Form((0, 2), {"recurrent": "output"}),
    "TGRU": _Form((0,), keeps_input=True),
    "TLSTM": _Form((1,), keeps_input=True),
    "tauGRU": _Form((0,)),
}


# Types of options that can be compared by value.
_NUMBERS = frozenset((bool, int, float, str))


class _Kind:
    """A class of torchrecurrent layers, as it was when the first layer was replaced."""

    def __init__(self, layer: Any, cell: Any, ours: type[Cell]) -> None:
        self.layer, self.cell, self.ours = layer, cell, ours
        count = ours.program_of(read_options(ours, {}), True).states
        self.form = _FORMS.get(layer.__name__, _Form(tuple(range(count))))
        self._before = self._methods()
        self.names = list(shapes_of(ours, 1, 1, True))
        self._options = list(read_options(ours, {}))
        self._read: dict[Any, dict[str, Any] | None] = {}

    def _methods(self) -> tuple[Any, ...]:
        return (
            *(each.forward for each in (self.layer, self.cell, *_ACTIVATIONS)),
            *(self.cell.__call__, nn.Module._call_impl),
        )

    def options_of(self, cell: Any) -> dict[str, Any] | None:
        """Return a cell's options in our terms; None if our cell has no such options."""
        found = dict(self.form.options)
        for name in self._options:
            if name in found or name == "delay":
                continue
            if not name.endswith("nonlinearity"):
                found[name] = vars(cell).get(name)
                continue
            act = cell._modules.get(name.replace("nonlinearity", "act"))
            if act is None and name == "output_nonlinearity":
                act = cell._modules.get("out_act")
            function = _function_of(act)
            if function is None:
                return None
            found[name] = function
        if not all(type(value) in _NUMBERS for value in found.values()):
            return self._checked(found)
        key = tuple((name, type(value), value) for name, value in found.items())
        if key not in self._read:
            self._read[key] = self._checked(found)
        return self._read[key]

    def _checked(self, found: dict[str, Any]) -> dict[str, Any] | None:
        """Return options checked by our cell; None if they are wrong."""
        try:
            return read_options(self.ours, found)
        except InputError:
            return None

    def is_as_before(self, cells: Any) -> bool:
        """Return whether cells still have their original methods, pruning aside."""
        if type(cells) is not nn.ModuleList or self._methods() != self._before:
            return False
        for cell in cells:
            hooks = cell._forward_pre_hooks
            if (
                type(cell) is not self.cell
                or is_seen(cell)
                or (hooks and not all(map(is_pruning, hooks.values())))
            ):
                return False
        return True


def _function_of(act: Any) -> str | None:
    """Return the name of the function that a module computes, if nothing observes its calls."""
    name, settings = _ACTIVATIONS.get(type(act), ("", {}))
    if (
        not name
        or is_seen(act)
        or act._forward_pre_hooks
        or any(getattr(act, each) != value for each, value in settings.items())
    ):
        return None
    return name


class _Layer(metaclass=Kind):
    """The forward pass that replaces torchrecurrent's."""

    kind: _Kind

    def forward(self: Any, inp: Any, state: Any = None, *, resets: Any = None) -> Any:
        """Run a whole sequence, or let torchrecurrent run it step by step.

        `resets` have shape ``(T, batch)``, with `batch_first` ``(batch, T)``. Before a step where
        they are True, the state of the sample is reset.
        """
        if resets is not None:
            if not isinstance(inp, Tensor) or inp.dim() != 3:
                raise InputError(f"inp is {short(inp)}; expected a tensor (T, batch, input_size)")
            resets = check_resets(resets, inp)
        if not (torch.compiler.is_compiling() or is_watched() or _is_slower(self, inp, resets)):
            sequence = _sequence_of(self, inp, state)
            if sequence is not None:
                return sequence.run(inp, state, resets)
        if resets is None:
            return self.kind.layer.forward(self, inp, state)
        if self.batch_first:
            outputs, last = _by_steps(self, inp.transpose(0, 1), state, resets.transpose(0, 1))
            return outputs.transpose(0, 1), last
        return _by_steps(self, inp, state, resets)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        if type(self) is _class_of(self.kind.layer):
            return _without_state, (self.kind.layer,), dict(vars(self))
        return super().__reduce_ex__(protocol)


def _is_slower(layer: Any, inp: Any, resets: Any) -> bool:
    """Return whether torchrecurrent is faster, as for one step of a wide or simple cell."""
    if resets is not None or not isinstance(inp, Tensor) or inp.dim() != 3:
        return False
    if inp.shape[bool(layer.batch_first)] != 1:
        return False
    about = inp.shape[2], layer.hidden_size, layer.num_layers, torch.is_grad_enabled()
    return _is_slower_step(layer.kind.ours, *about)


# Times of our kernels and of torchrecurrent, without and with a backward pass, which
# `python -m bench map` measured on a Xeon with AVX-512.
_OURS = Seconds(call=90e-6, weight=0.7e-9), Seconds(call=200e-6, weight=3.7e-9)
_THEIRS = (Seconds(operation=8e-6, weight=0.15e-9), Seconds(operation=25e-6, weight=0.8e-9))


@functools.lru_cache(maxsize=256)
def _is_slower_step(
    cell: type[Cell], inputs: int, units: int, layers: int, has_backward: bool
) -> bool:
    program = cell.program_of(read_options(cell, {}), True)
    operations = layers * sum(bool(each.arguments) for each in topological(program.traced))
    shapes = [dict(_shapes_of(cell, width, units)) for width in (inputs, units)]
    first, others = (sum(map(math.prod, each.values())) for each in shapes)
    weights = first + (layers - 1) * others
    ours, theirs = (
        each[has_backward].of(operations=operations, weights=weights) for each in (_OURS, _THEIRS)
    )
    return ours > theirs


def _by_steps(layer: Any, inp: Tensor, state: Any, resets: Tensor) -> tuple[Tensor, Any]:
    """Let torchrecurrent run step by step, with resets of states."""
    name = layer.kind.layer.__name__
    if name == "tauGRU":
        raise InputError(
            "resets were given to a tauGRU without kernels, and torchrecurrent's reads earlier "
            "states; expected float32 or float64 on the CPU, outside of torch.compile"
        )
    outputs = []
    for t in range(len(inp)):
        given = inp[t : t + 1]
        given = given.transpose(0, 1) if layer.batch_first else given
        output, state = layer.kind.layer.forward(layer, given, _begun(state, resets[t]))
        outputs.append(output.transpose(0, 1) if layer.batch_first else output)
    return torch.cat(outputs), state


def _begun(state: Any, anew: Tensor) -> Any:
    """Return states, set to 0 for samples that are reset."""
    if state is None:
        return None
    if isinstance(state, tuple):
        return tuple(_begun(each, anew) for each in state)
    return state.masked_fill(anew[:, None], 0)


def _without_state(layer: Any) -> Any:
    """Return an empty layer, for a copy or a file to fill."""
    kind = _class_of(layer)
    return kind.__new__(kind)


class _Sequence(NamedTuple):
    """A layer at one call: its program and its parameters."""

    layer: Any
    kind: _Kind
    mode: str
    states: int
    params: list[list[Tensor]]
    masks: list[list[Tensor | None]]

    def run(self, inp: Tensor, state: Any, resets: Tensor | None = None) -> Any:
        """Return the results of the layer."""
        if self.layer.batch_first:
            inp = inp.transpose(0, 1)
            resets = None if resets is None else resets.transpose(0, 1)
        before: Any = None
        if self.kind.layer.__name__ == "JANET" and state is not None:
            # The layer's two states are equal from the first step on.
            if resets is not None:
                state, resets = _begun(state, resets[0]), resets[1:]
            given = inp[:1].transpose(0, 1) if self.layer.batch_first else inp[:1]
            before, state = self.kind.layer.forward(self.layer, given, state)
            before = before.transpose(0, 1) if self.layer.batch_first else before
            inp = inp[1:]
        outputs, last = self._whole(inp, state, resets) if len(inp) else (before, state)
        if before is not None and len(inp):
            outputs = torch.cat([before, outputs])
        return outputs.transpose(0, 1) if self.layer.batch_first else outputs, last

    def _whole(self, x: Tensor, state: Any, resets: Tensor | None) -> tuple[Tensor, Any]:
        """Run all layers at once, or one by one if there is dropout between them."""
        form, units, layers = self.kind.form, self.layer.hidden_size, len(self.params)
        kept = self._dropout(x)
        calls = layers if kept or form.keeps_input else 1
        each = layers // calls
        lasts, inputs = [], []
        for call in range(calls):
            own = slice(call * each, (call + 1) * each)
            begin = None if state is None else self._begin(own, x, state)
            flat = [param for one in self.params[own] for param in one]
            masks = [mask for one in self.masks[own] for mask in one]
            given = [x, *flat, *([] if begin is None else [begin])]
            keeps = torch.is_grad_enabled() and any(one.requires_grad for one in given)
            inputs.append(x[-1])
            about = self.mode, units, each, True, False, DEFAULTS.encode(), keeps
            some = masks if any(mask is not None for mask in masks) else []
            often = None
            if not some and resets is None:
                often = run_prepared(x, begin, flat, self.mode, units, each, keeps)
            if often is None:
                x, last, _ = run(x, begin, None, flat, some, *about, resets=resets)
            else:
                x, last = often
            lasts.append(last)
            if kept and call + 1 < calls:
                x = x * kept[call]
        whole = lasts[0] if calls == 1 else torch.cat(lasts)
        parts = apart(whole, self.states)
        # A copy: the caller may change one of two equal states.
        ends = tuple(
            parts[k].clone() if k in form.states[:n] else parts[k]
            for n, k in enumerate(form.states)
        )
        if form.keeps_input:
            return x, (ends[0], tuple(inputs))
        return x, ends if len(ends) > 1 else ends[0]

    def _begin(self, own: slice, x: Tensor, state: Any) -> Tensor:
        """Return the initial states of some layers in the operator's form."""
        form, states = self.kind.form, state if isinstance(state, tuple) else (state,)
        zeros = torch.zeros_like(states[0][own])
        parts = [zeros] * self.states
        for k, place in enumerate(form.states):
            parts[place] = states[k][own]
        if form.keeps_input:
            (at,) = range(own.start, own.stop)
            weight = self.params[at][self.kind.names.index("weight_hh")]
            products = functional.linear(states[1][at], weight)
            parts[form.states[0] + 1 :] = products[None].chunk(3, -1)
        return joined(parts)

    def _dropout(self, x: Tensor) -> list[Tensor]:
        """Return the dropout factors of outputs between layers, drawn as for single steps."""
        dropout = self.layer.dropout_layer
        if dropout is None or not dropout.training or dropout.p == 0 or len(self.params) == 1:
            return []
        ones = x.new_ones((x.shape[1], self.layer.hidden_size))
        drawn = [
            [functional.dropout(ones, dropout.p) for _ in self.params[1:]] for _ in range(len(x))
        ]
        return [torch.stack(own) for own in zip(*drawn, strict=True)]


def _sequence_of(layer: Any, inp: Any, state: Any) -> _Sequence | None:
    """Return the runner of a layer; None if there are no kernels, or anything is unknown."""
    kind, cells = layer.kind, layer._modules.get("cells")
    if (
        not isinstance(inp, Tensor)
        or inp.dim() != 3
        or 0 in inp.shape
        or inp.dtype not in _DTYPES
        or torch.is_autocast_enabled(inp.device.type)
        or "forward" in vars(layer)
        or not kind.is_as_before(cells)
        or len(cells) != layer.num_layers
        or not _is_plain_dropout(layer, inp)
    ):
        return None
    about = [kind.options_of(cell) for cell in cells]
    if about[0] is None or any(each != about[0] for each in about):
        return None
    options = about[0] if kind.layer.__name__ != "tauGRU" else {**about[0], "delay": layer.delay}
    try:
        mode = _mode_of(kind.ours, tuple(options.items()))
    except InputError:
        return None
    if not has_kernels(mode, layer.hidden_size, inp):
        return None
    inputs, params, masks = inp.shape[-1], [], []
    for cell in cells:
        for hook in cell._forward_pre_hooks.values():
            hook(cell, ())
        pruned = {hook._tensor_name for hook in cell._forward_pre_hooks.values()}
        own, some = [], []
        for name, shape in _shapes_of(kind.ours, inputs, layer.hidden_size):
            param = getattr(cell, name, None)
            if not isinstance(param, Tensor):
                return None
            if shape == () and param.numel() == 1 and param.is_floating_point():
                # A parameter of one number may be float32 among float64 ones, which decide.
                param = param.reshape(()) if param.dim() else param.to(inp.dtype)
            if tuple(param.shape) != shape or param.dtype != inp.dtype:
                return None
            if param.device != inp.device:
                return None
            own.append(param)
            mask = cell._buffers.get(f"{name}_mask") if name in pruned else None
            is_mask = mask is not None and param.dim() == 2 and mask.shape == param.shape
            some.append(mask if is_mask else None)
        params.append(own)
        masks.append(some)
        inputs = layer.hidden_size
    if not _are_states(kind.form, state, inp, layer):
        return None
    count = kind_of(mode).program(True).states
    return _Sequence(layer, kind, mode, count, params, masks)


@functools.lru_cache(maxsize=256)
def _mode_of(cell: type[Cell], options: tuple[Any, ...]) -> str:
    return register(cell, dict(options), True)


@functools.lru_cache(maxsize=256)
def _shapes_of(cell: type[Cell], inputs: int, units: int) -> tuple[Any, ...]:
    return tuple(shapes_of(cell, inputs, units, True).items())


def _is_plain_dropout(layer: Any, inp: Tensor) -> bool:
    dropout = layer.dropout_layer
    if dropout is None:
        return True
    return (
        type(dropout) is nn.Dropout
        and not dropout.inplace
        and not is_seen(dropout)
        and not dropout._forward_pre_hooks
        # Other layers draw dropout in another way.
        and (inp.is_cpu or not dropout.training)
    )


def _are_states(form: _Form, state: Any, inp: Tensor, layer: Any) -> bool:
    """Return whether states fit the layer, and have the input's dtype and device."""
    if state is None:
        return True
    batch = inp.shape[0 if layer.batch_first else 1]
    expected = layer.num_layers, batch, layer.hidden_size
    states = state if isinstance(state, tuple) else (state,)
    shapes: list[Any] = [expected] * len(form.states)
    if form.keeps_input:
        if len(states) != 2 or not isinstance(states[1], tuple):
            return False
        states = (states[0], *states[1])
        sizes = [inp.shape[-1], *[layer.hidden_size] * (layer.num_layers - 1)]
        shapes += [(batch, size) for size in sizes]
    elif isinstance(state, tuple) != (len(form.states) > 1):
        return False
    return len(states) == len(shapes) and all(
        isinstance(each, Tensor)
        and tuple(each.shape) == shape
        and each.dtype == inp.dtype
        and each.device == inp.device
        for each, shape in zip(states, shapes, strict=True)
    )


# -- Classes --------------------------------------------------------------------------------------


def _module() -> Any:
    """Return torchrecurrent, if it was imported."""
    return sys.modules.get("torchrecurrent")


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("torchrecurrent")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a torchrecurrent layer, or of a class derived from one."""
    base = getattr(getattr(_module(), "base", None), "RecurrentLayerBase", None)
    return base is not None and isinstance(module, base)


def is_replacement(module: nn.Module) -> bool:
    """Return whether a module is a replaced layer."""
    return isinstance(module, _Layer)


def why_not(module: Any) -> str:
    """Return why a torchrecurrent layer is left alone; "" if it can be replaced."""
    own: Any = type(module)
    kind = _kind_of(own)
    if kind is None:
        return f"it is a {type(module).__name__}, whose forward may differ"
    if _version() != _VERSION:
        return f"torchrecurrent is {_version()}; expected {_VERSION}, whose cells are known"
    options = [kind.options_of(cell) for cell in getattr(module, "cells", [])]
    if not options or None in options:
        return "a nonlinearity has no kernel"
    if any(each != options[0] for each in options):
        return "its cells have different options"
    return ""


def replacement_of(module: Any) -> Any:
    """Return the class that replaces the class of a torchrecurrent layer."""
    layer: Any = type(module)
    return _class_of(layer)


@functools.cache
def _kind_of(layer: Any) -> _Kind | None:
    """Return the :class:`_Kind` of a class of layers."""
    package, name = _module(), layer.__name__
    ours = getattr(catalogue, name, None) if name in catalogue.__all__ else None
    cell = getattr(package, f"{name}Cell", None)
    if ours is None or cell is None or getattr(package, name, None) is not layer:
        return None
    return _Kind(layer, cell, ours)


@functools.cache
def _class_of(layer: Any) -> Any:
    """Return the class that replaces a class of layers."""
    kind = _kind_of(layer)
    if kind is None:
        raise InputError(f"{layer.__name__} is no layer of torchrecurrent {_VERSION}")
    about = {"kind": kind, "_plain": layer, "__doc__": layer.__doc__, "__module__": __name__}
    return type(layer.__name__, (_Layer, layer), about)
