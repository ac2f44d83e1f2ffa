"""RNN, GRU and LSTM that replace PyTorch's, with kernels for whole sequences."""

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
    """Return the signature of all three: PyTorch's, with our options."""
    _, _, *own = inspect.signature(nn.RNNBase.__init__).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    more = DEFAULTS._asdict().items()
    return inspect.Signature(
        [*own, *(inspect.Parameter(name, kind, default=each) for name, each in more)]
    )


# The compiler of each function that is called next; None outside of ``torch.compile``.
_compiler_of_frames: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback


@functools.cache
def _uncompiled() -> Any:
    """Return the forward pass for calls of a compiled model outside its graphs.

    Unless `allow_rnn` is set, PyTorch leaves recurrent modules out of its graphs, and would compile
    each function that a call uses separately.
    """
    return torch.compiler.disable(Sequences.forward)


def _in_place_of(theirs: Any) -> Any:
    """Return the forward pass that replaces that of a PyTorch class.

    ``torch.jit.script`` compiles the source of the wrapped function, PyTorch's, and exporters read
    its signature. The script compiler looks up its names in this file.
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
    """Base of all three: our additions to PyTorch's modules."""

    # For `torch.nn.utils.skip_init`, which looks for `device`.
    __signature__: ClassVar[Any] = _signature()
    # Read by `torch.jit.script`.
    __annotations__ = nn.RNNBase.__annotations__
    __jit_unused_properties__: ClassVar[Any] = [
        *("all_weights", "is_usual", "_options", "_sizes", "_is_short", *Options._fields)
    ]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        own = Options.taken_from(options)
        super().__init__(*arguments, **options)
        self._set_options(own)

    def _weights(self) -> list[Tensor]:
        """Return all parameters, recomputed as often as PyTorch does: some change with each use."""
        if "parametrizations" not in self._modules:
            return super()._weights()
        self._update_flat_weights()
        return list(self._flat_weights)

    def _without_kernels(
        self, given: Any, hx: Any, resets: Any = None, reset_states: Any = None, **further: Any
    ) -> Any:
        """Let PyTorch compute, or refuse, calls without kernels, unless there are resets."""
        if resets is None and not self.return_states:
            return self._theirs.forward(self, given, hx)
        if self.proj_size and self.return_states:
            raise InputError(
                f"return_states is {self.return_states!r}, and proj_size is {self.proj_size}; "
                "expected 0: states of different lengths are no one array"
            )
        return self._differentiably(given, hx, self._weights(), resets, reset_states)


class RNN(_Recurrent, nn.RNN):
    """Run a simple recurrent network; it replaces :class:`torch.nn.RNN`.

    Arguments, attributes, parameters, results and errors are those of PyTorch's module. The
    compiled loops of :class:`.TrainingStep` compute whole sequences and all gradients, with any
    number of layers, in one direction or both, and with samples of different lengths
    (`PackedSequence`). If :mod:`torch.nn.utils.prune` has kept less than a quarter of a weight,
    kernels do not read the pruned part; each call reads the contents of the masks.

    If CuPy is installed, GPU kernels run for tensors on a CUDA device, on PyTorch's current stream.
    PyTorch itself computes everything that has no kernel: tensors on other devices, more units than
    GPU kernels take, dtypes other than float32 and float64, autocast, ``torch.jit.trace`` and
    ``torch.jit.script``. It also computes `proj_size` with dropout between layers, on a GPU, in
    graphs of ``torch.compile``, and over fewer than 8 steps, where it is faster.

    A module is an instance of PyTorch's class, and its class compares equal to PyTorch's. So code
    that looks for PyTorch's class finds it, even in a table by ``type(module)``, such as that of
    ``torch.ao.quantization.quantize_dynamic``. Like PyTorch's module, it stays outside the graphs
    of ``torch.compile`` unless ``torch._dynamo.config.allow_rnn`` is set; then it is one operator.

    There are three options, each an argument by name and an attribute. `memory_limit` is the most
    bytes that the forward pass keeps for the backward pass, without input and output. Gates that do
    not fit are recomputed. `truncate` limits how far gradients flow (truncated back-propagation
    through time). ``truncate=k`` cuts the steps into segments of ``k``. The gradient of a loss of a
    segment's outputs flows through that segment and the previous one; :class:`.TrainingStep` has
    the formula. Outputs stay the same, but gradients leave out the effect of earlier steps, so
    dependencies over more than ``2·k`` steps are not learned. The forward pass then keeps almost
    nothing. `truncate` works in kernels on the CPU, for modules of one direction without dropout
    between layers.

    `return_states` adds the states of all steps to the results:
    ``output, (h_n, c_n), (h, c) = LSTM(12, 20, return_states=True)(x)``. Here `h` is the output,
    and `c` has the cell states of the last layer in the same form. Gradients flow through all of
    them. Cells of one state return their output a second time. With ``return_states="layers"`` they
    are the states of all layers, with one more axis: ``h`` is
    ``(T, batch, layers · directions, hidden_size)``, or the like with `batch_first` or a
    `PackedSequence`, and ``h[..., k, :]`` are the states whose last is ``h_n[k]``.

    There are derivatives of any order, in both modes. The directional derivative of a network is a
    forward pass of cells with twice as many states, which also compute the derivatives. The
    derivative of its gradients is the backward pass of these cells (Pearlmutter, 1994). On the CPU
    the transforms of ``torch.func`` use the kernels. Under ``vmap`` a new axis of inputs or states
    becomes more samples. A new axis of parameters, for an ensemble of models, or of gradients in
    parameters, for per-sample gradients, becomes calls that threads share, without a Python loop.

    Unlike PyTorch's module it takes `resets`. ``net(x, hx, resets=resets)`` sets the state of a
    sample to zero before each step where these bools are True, such as the first step of an
    episode. `resets` have the first axes of the input: ``(T, batch)``, with `batch_first`
    ``(batch, T)`` or, without samples, ``(T,)``; for a `PackedSequence` they are packed like it. A
    direction that runs backward in time sets its state to zero between such a step and the step
    before it. With resets, modules without a kernel run step by step. ``reset_states=states``, in
    the form of `hx`, replace the zeros; their gradients are sums over the resets of each sample.

    Gradients can be computed more than once from one graph (`retain_graph`). If a state or an input
    is infinite or NaN, it has no effect through a pruned weight that is not read; PyTorch's product
    with 0 is NaN.

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
    """Run a GRU network; it replaces :class:`torch.nn.GRU`. See :class:`RNN`."""

    _plain = _theirs = nn.GRU
    states = 1
    forward = _in_place_of(nn.GRU)


class LSTM(_Recurrent, nn.LSTM):
    """Run an LSTM network; it replaces :class:`torch.nn.LSTM`. See :class:`RNN`."""

    _plain = _theirs = nn.LSTM
    states = 2
    forward = _in_place_of(nn.LSTM)
