"""RNN, GRU and LSTM in place of PyTorch's: the same modules, by kernels for whole sequences."""

from __future__ import annotations

import functools
import inspect
from typing import Any, ClassVar

import torch
from torch import _VF, Tensor, nn  # noqa: F401, for PyTorch's source: see `_in_place_of`
from torch.nn.utils.rnn import PackedSequence  # noqa: F401

from ..errors import InputError
from ..recurrent.arguments import DEFAULTS, Options
from .calls.sequences import Sequences
from .conversion.kinds import Kind


def _signature() -> inspect.Signature:
    """Return the signature of all three: PyTorch's, and what these take besides."""
    _, _, *own = inspect.signature(nn.RNNBase.__init__).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    more = DEFAULTS._asdict().items()
    return inspect.Signature(
        [*own, *(inspect.Parameter(name, kind, default=each) for name, each in more)]
    )


# What compiles each function that is called next; None outside of ``torch.compile``.
_compiler_of_frames: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback


@functools.cache
def _uncompiled() -> Any:
    """Return the forward pass for calls that a compiled model makes outside of its graphs.

    Unless `allow_rnn` is set, PyTorch leaves recurrent modules out of these, and would compile each
    of the functions that a call goes through by itself.
    """
    return torch.compiler.disable(Sequences.forward)


def _in_place_of(theirs: Any) -> Any:
    """Return the forward pass in place of that of a class of PyTorch.

    ``torch.jit.script`` compiles the source, and exporters read the signature, of what a function
    wraps: PyTorch's. It finds the names in it among those of this file.
    """

    def forward(
        self: Any,
        input: Any,  # noqa: A002
        hx: Any = None,
        *,
        resets: Any = None,
        reset_states: Any = None,
    ) -> Any:
        is_apart = not torch.compiler.is_compiling() and _compiler_of_frames() is not None
        run = _uncompiled() if is_apart else Sequences.forward
        return run(self, input, hx, resets=resets, reset_states=reset_states)

    forward.__wrapped__ = theirs.forward  # type: ignore[attr-defined]
    forward.__module__ = theirs.forward.__module__
    forward.__doc__ = Sequences.forward.__doc__
    return forward


class _Recurrent(Sequences, metaclass=Kind):
    """What all three have beside the attributes of PyTorch's."""

    # For `torch.nn.utils.skip_init`, which looks for `device`.
    __signature__: ClassVar[Any] = _signature()
    # What `torch.jit.script` goes by.
    __annotations__ = nn.RNNBase.__annotations__
    __jit_unused_properties__: ClassVar[Any] = [
        *("all_weights", "is_usual", "_options", "_sizes", "_is_short", *Options._fields)
    ]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        own = Options.taken_from(options)
        super().__init__(*arguments, **options)
        self._set_options(own)

    def _weights(self) -> list[Tensor]:
        """Return all parameters, made anew as often as PyTorch does: some change by that."""
        if "parametrizations" not in self._modules:
            return super()._weights()
        self._update_flat_weights()
        return list(self._flat_weights)

    def _without_kernels(
        self, given: Any, hx: Any, resets: Any = None, reset_states: Any = None, **further: Any
    ) -> Any:
        """Let PyTorch compute, or refuse, what has no kernels, unless states begin anew."""
        if resets is None and not self.return_states:
            return self._theirs.forward(self, given, hx)
        if self.proj_size and self.return_states:
            raise InputError(
                f"return_states is {self.return_states!r}, and proj_size is {self.proj_size}; "
                "expected 0: states of different lengths are no one array"
            )
        return self._differentiably(given, hx, self._weights(), resets, reset_states)


class RNN(_Recurrent, nn.RNN):
    """Run a simple recurrent network, in place of :class:`torch.nn.RNN`.

    Arguments, attributes, parameters and results are those of PyTorch's module, and so are its
    errors. A whole sequence, and all gradients of it, are computed by the compiled loops of
    :class:`.TrainingStep`, with any number of layers, in one direction or both,
    and with samples of different lengths (`PackedSequence`). Weights that
    :mod:`torch.nn.utils.prune` has pruned are not read where less than a quarter of them is kept;
    each call reads the contents of the masks.

    Tensors on a CUDA device take the kernels of a GPU, on PyTorch's current stream, where CuPy is
    installed. PyTorch computes all that has no kernel: tensors on other devices, more units than a
    GPU's kernels take, dtypes other than float32 and float64, autocast, ``torch.jit.trace`` and
    ``torch.jit.script``; and `proj_size` with dropout between layers, on a GPU, in graphs of
    ``torch.compile``, and over fewer than 8 steps, for which it takes less time.

    A module is an instance of PyTorch's, and its class equals PyTorch's, so that it is found where
    others look for that: by ``type(module)`` in a table, too, as of
    ``torch.ao.quantization.quantize_dynamic``. Like PyTorch's, it stands outside of the graphs of
    ``torch.compile`` unless ``torch._dynamo.config.allow_rnn`` is set; then it is one operator.

    The forward pass keeps what the backward pass needs. `memory_limit`, an attribute and an
    argument by name, bounds the bytes of it, beside input and output: gates that do not fit are
    computed again. `truncate`, likewise, bounds how far gradients flow: ``truncate=k`` cuts the
    steps into segments of ``k``, and the gradient of the part of a loss that reads the outputs of a
    segment flows through that and the one before, not further (truncated back-propagation through
    time; the formula is that of :class:`.TrainingStep`). Outputs are the same,
    but gradients leave out the effect of earlier steps, so dependencies over more than ``2·k``
    steps are not learned. Next to nothing is kept. It works on the CPU, where kernels run, for
    modules of one direction without dropout between layers.

    `return_states`, likewise, returns the states of all steps: ``output, (h_n, c_n), (h, c) =
    LSTM(12, 20, return_states=True)(x)``, where `c` has the cell states of the last layer in the
    form of the output, which is `h`. Gradients flow through all of them. Cells of one state return
    their output a second time. With ``return_states="layers"`` they are the states of all layers,
    each with one more axis: ``h`` is ``(T, batch, layers · directions, hidden_size)``, or what
    `batch_first` or a `PackedSequence` make of that, and ``h[..., k, :]`` are the states of which
    ``h_n[k]`` is the last.

    There are derivatives of any order, in both modes. The derivative of a network in a direction is
    a forward pass of cells of twice as many states, which also compute the derivatives, and the
    derivative of its gradients is a backward pass of these (Pearlmutter, 1994). On the CPU the
    transforms of ``torch.func`` take the kernels: under ``vmap`` a new axis of inputs or states
    makes more samples. A new axis of parameters, as for an ensemble of models, or of gradients in
    parameters, one for each sample, makes calls that threads share, without a loop in Python.

    Unlike PyTorch's module it takes `resets`: ``net(x, hx, resets=resets)`` sets the state of a
    sample to zero before each step where these bools are True, such as the first step of an
    episode. They are in the order of the first axes of the input, ``(T, batch)``, with
    `batch_first` ``(batch, T)`` or, without samples, ``(T,)``; those of a `PackedSequence` are
    packed like it. In a direction that runs backward in time, the state is set to zero on the way
    from such a step to the one before it. With resets, modules that have no kernel are computed
    step by step. ``reset_states=states``, in the form of `hx`, are set in place of zeros; their
    gradients are sums over the resets of each sample.

    Gradients can be computed more than once from one graph (`retain_graph`). A state or an input
    that is infinite or NaN has no effect through a pruned weight that is not read, where PyTorch's
    product with 0 is NaN.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch import RNN
    >>> net = RNN(12, 20, batch_first=True)
    >>> output, state = net(torch.zeros(16, 50, 12))
    >>> output.sum().backward()
    >>> net.weight_hh_l0.grad.shape
    torch.Size([20, 20])
    """

    _plain = _theirs = nn.RNN
    states = 1
    forward = _in_place_of(nn.RNN)


class GRU(_Recurrent, nn.GRU):
    """Run a GRU network, in place of :class:`torch.nn.GRU`; see :class:`RNN`."""

    _plain = _theirs = nn.GRU
    states = 1
    forward = _in_place_of(nn.GRU)


class LSTM(_Recurrent, nn.LSTM):
    """Run an LSTM network, in place of :class:`torch.nn.LSTM`; see :class:`RNN`."""

    _plain = _theirs = nn.LSTM
    states = 2
    forward = _in_place_of(nn.LSTM)
