"""Cell: a recurrent cell, defined by its parameters and its step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import DTypeLike

from ..arrays.arrays import Mirrored, check_numba_cuda, for_kernels, namespace, read_array
from ..chains.containers import BatchedCSR, CSRChain
from ..checks import check_choice, check_count, check_flag
from ..errors import Allocating, InputError, InputTypeError
from ..execution.sharing import quiet
from ..locks import cached_property
from ..parameters.fixed import Fixed
from ..parameters.parametrised import Parametrised, check_mask, initial
from ..symbolic.implicit import ImplicitPattern
from ..symbolic.pattern import Pattern
from .arguments import check_state
from .compiled import renderer_of
from .definition import (
    Hidden,
    _Declared,
    _Matrix,
    begins_of,
    bias_name,
    check_uses,
    declared,
    further_of,
    initial_of,
    read_options,
    shapes_of,
    sizes_of,
    trace,
    width_of,
)
from .further import filled_up
from .initial import initial_states
from .jacobian import Equations, Linearization, place_of, read_arrays, values_room
from .program import INPUT, CellProgram
from .render.numpy import ArrayCode
from .render.text import describe
from .step import OneCell, TrainingStep, unroll
from .units import CellUnits

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import OptionsDict
    from .streams import Stream

Array = Any  # numpy.ndarray or cupy.ndarray
Shape = tuple[int, ...]


class Cell(Parametrised, Fixed):
    """A recurrent cell ``s_t = f(x_t, s_{t-1}; θ)``, defined by its parameters and its step.

    A class of cells declares matrices (:class:`Input`, :class:`Hidden`), other parameters
    (:class:`Vector`, :class:`Scalar`) and options (:class:`Constant`, :class:`Choice`). It defines
    ``step(self, x, *states)``, which computes the new states in plain arithmetic on vectors of one
    number per unit. The first state is the output ``h_t``. When the class is made, its step is
    called once, on symbols; Jacobians, gradients and kernels follow from that. ``print(cell)``
    shows what a step computes, and what it keeps for the backward pass.

    A step may read further inputs: arrays that each call passes (:class:`Given`), and random masks
    (:class:`Mask`). :meth:`training_step` and modules take them by name. Other methods of a cell
    take an `x` of ``input_size + further·hidden_size`` columns: the input, then the further inputs
    in the order of their declaration. You may leave out masks there, which are then their
    expectation, and in :meth:`unroll` also step numbers (:class:`StepNumber`).

    :meth:`unroll` runs a sequence step by step; :meth:`training_step` runs it forward and backward.
    Other methods compute steps whose previous states are known. Their arrays may have any number of
    axes before the last one, such as ``(T, batch)`` for all steps and samples of a sequence.

    Parameters
    ----------
    input_size, hidden_size : int
        Length of ``x_t`` and ``h_t``.
    bias : bool, default True
        Whether matrices that are declared with a bias have one.
    dtype : {float32, float64}, default float32
        Dtype of initial parameters.
    rng : numpy.random.Generator or int, optional
        Source of the initial parameters: uniform between ``±1/√hidden_size``, as in PyTorch, unless
        the class declares an initial value.
    **options
        Options that the class declares; and masks such as ``weight_hh_mask``, a bool array of the
        shape of that matrix, True where a weight is kept. A pruned weight counts as 0 and has a
        gradient of 0. A pruned hidden weight also leaves the pattern.

    Attributes
    ----------
    state_size : int
        Length of ``s_t``, which is all states one after the other.
    pattern : Pattern
        Where ``(∂s_t/∂s_{t-1})ᵀ`` may have nonzeros, whatever the input and the parameters.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong; or, when a class is made, if its step cannot be traced.

    Examples
    --------
    The minimal gated unit (Zhou et al., 2016):

    >>> import numpy as np
    >>> from sparsescan.recurrent import Cell, Hidden, Input, sigmoid
    >>> class MGU(Cell):
    ...     weight_ih = Input("f", "n")
    ...     weight_hh = Hidden("f", "n")
    ...     def step(self, x, h):
    ...         f = sigmoid(self.weight_ih.f(x) + self.weight_hh.f(h))
    ...         n = np.tanh(self.weight_ih.n(x) + self.weight_hh.n(f * h))
    ...         return h + f * (n - h)
    >>> cell = MGU(3, 4)
    >>> cell.weight_ih.shape, cell.bias_hh.shape, cell.pattern.shape
    ((8, 3), (8,), (4, 4))
    >>> print(cell)
    MGU(3, 4, nnz=16)
      stage 1 of 2:
        s_0 = weight_ih.f(x) + weight_hh.f(h)
        f = sigmoid(s_0)
        t = f * h
      stage 2 of 2:
        s_1 = weight_ih.n(x) + weight_hh.n(t)
        n = tanh(s_1)
        t_2 = n - h
        new h = h + (f * t_2)
      kept for the backward pass, beside states and inputs: f, n
      computed again by it: t, t_2
    """

    _programs: ClassVar[dict[Any, CellProgram]]
    _codes: ClassVar[dict[Any, ArrayCode]]
    # Whether a parameter that the step does not use is an error.
    _trains_all: ClassVar[bool] = True

    def __init_subclass__(cls, **about: Any) -> None:
        super().__init_subclass__(**about)
        cls._programs, cls._codes = {}, {}
        if inspect.isfunction(vars(cls).get("forward")):
            raise InputTypeError(
                f"{cls.__name__} defines forward, which cells make of their step; expected "
                "step(self, x, h, …), which returns the new states"
            )
        if cls.step is not Cell.step:
            cls.program_of(read_options(cls, {}))
            if cls._trains_all:
                check_uses(cls)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        dtype: DTypeLike = np.float32,
        rng: np.random.Generator | int | None = None,
        **options: Any,
    ) -> None:
        if type(self).step is Cell.step:
            raise InputTypeError(
                f"{type(self).__name__} is a base class, without a step; expected a class that has "
                "one"
            )
        self.input_size = check_count("input_size", input_size, 1)
        self.hidden_size = check_count("hidden_size", hidden_size, 1)
        self.bias = check_flag("bias", bias)
        parameters = self._declared
        matrices = [name for name, each in parameters.items() if isinstance(each, _Matrix)]
        masks = {name: options.pop(f"{name}_mask", None) for name in matrices}
        self.options = read_options(type(self), options)
        for each in self.program.reductions:
            if self.hidden_size % each.heads:
                raise InputError(
                    f"hidden_size is {hidden_size}; expected a multiple of {each.heads}, the heads "
                    f"of a {each.operation} in {type(self).__name__}.step"
                )
        for name, (heads, *sides) in self.program.partial.items():
            if self.hidden_size % heads:
                raise InputError(
                    f"hidden_size is {hidden_size}; expected a multiple of {heads}, the heads of "
                    f"{name} in {type(self).__name__}"
                )
            if self.hidden_size < max(sides):
                raise InputError(
                    f"hidden_size is {hidden_size}; expected at least {max(sides)}, which {name} "
                    f"has of rows or columns in {type(self).__name__}"
                )
        sizes = sizes_of(type(self), self.options, self.hidden_size)
        if self.hidden_size < max(sizes):
            raise InputError(
                f"hidden_size is {hidden_size}; expected at least {max(sizes)}, the numbers of a "
                f"State of {type(self).__name__}"
            )
        if self._reads_units and self.input_size != self.hidden_size:
            raise InputError(
                f"input_size is {input_size} and hidden_size {hidden_size}; expected equal ones, "
                f"since the step of {type(self).__name__} reads the input of each unit"
            )
        self.state_size = self.program.states * self.hidden_size
        about = self.input_size, self.hidden_size, self.bias, self.program.partial
        shapes = shapes_of(type(self), *about)
        draw = initial(1 / math.sqrt(self.hidden_size), dtype, rng)
        self.declare_parameters(shapes, draw, initial_of(type(self)))
        self.masks: dict[str, Mirrored | None] = {
            name: check_mask(f"{name}_mask", mask, self._shapes[name])
            for name, mask in masks.items()
        }

    def step(self, *vectors: Any, **further: Any) -> Any:
        """Return the new states; each class defines it as ``step(self, x, *states)``."""
        raise NotImplementedError

    @classmethod
    def program_of(cls, options: dict[str, Any], bias: bool = True) -> CellProgram:
        """Return the program of the step with some options, and its derivatives."""
        key = bias, *options.items()
        program = cls._programs.get(key)
        if program is None:
            # Threads that trace at the same time all get the same program.
            program = cls._programs.setdefault(key, trace(cls, options, bias))
        return program

    @property
    def program(self) -> CellProgram:
        """The operations of the step, and its derivatives."""
        return self.program_of(self.options, self.bias)

    @property
    def _declared(self) -> dict[str, _Declared]:
        """The parameters that the class declares, without biases."""
        return declared(type(self))

    @property
    def _biases(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The matrices with a bias, by name, and their gates that have one."""
        return {
            name: (bias_name(name), each.biased)
            for name, each in self._declared.items()
            if isinstance(each, _Matrix) and each.biased
        }

    @property
    def _reads_units(self) -> bool:
        """Whether elementwise operations read the input, so that it has one number per unit."""
        terms = [term for slot in self.program.slots for term in slot.terms]
        return self.program.uses_input or any(
            term.argument is INPUT and isinstance(self._declared[term.matrix], Hidden)
            for term in terms
        )

    @property
    def _code(self) -> ArrayCode:
        """The step and its derivatives on arrays, compiled once per class."""
        key = self.bias, *self.options.items()
        if key not in self._codes:
            gates = {name: each.gates for name, each in self._declared.items()}
            states = list(inspect.signature(self.step).parameters)[1:]
            states = states if len(states) == self.program.states else []
            further = list(further_of(type(self)))
            about = type(self).__name__, gates, states, further
            self._codes[key] = ArrayCode(self.program, *about)
        return self._codes[key]

    @cached_property
    def _equations(self) -> Equations:
        """The equations of the cell, on arrays."""
        return Equations(self)

    def __getstate__(self) -> dict[str, Any]:
        # Compiled functions are not copied: a copy, maybe in another process, makes its own.
        return {name: each for name, each in vars(self).items() if name != "_equations"}

    def source(self, target: str, which: str) -> str:
        r"""Return the source of a pass that was generated from the step.

        Parameters
        ----------
        target : {"numpy", "cpu", "cuda"}
            The NumPy or CuPy source for all steps at once; the source of the compiled loop over
            steps for a CPU, whose vectors hold units or samples; or the source for a GPU, for one
            unit of one sample.
        which : {"forward", "backward"}
            The pass.

        Returns
        -------
        str
            The source. For a GPU it is for float32 and one sample per thread block.

        Raises
        ------
        InputError, InputTypeError
            If `target` or `which` is wrong, or kernels of a GPU do not compute the step.
        DeviceError
            If the target is "cuda", and Numba's CUDA target cannot be used.

        Examples
        --------
        >>> from sparsescan.recurrent import RNNCell
        >>> text = RNNCell(2, 3).source("numpy", "forward")
        >>> print(text.partition("RNNCell.")[2].strip("\"\n "))
        # s_0 = weight_ih(x) + weight_hh(h)
            (s_0,) = sums(0)
            xp.tanh(s_0, out=new[0])
        """
        check_choice("target", target, "numpy", "cpu", "cuda")
        check_choice("which", which, "forward", "backward")
        if target == "numpy":
            return self._code.text(which)
        if target == "cpu":
            renderer = renderer_of(self.program)
            return renderer.forward if which == "forward" else renderer.backward
        check_numba_cuda()
        from .device import source_of

        return source_of(self, np.float32, is_backward=which == "backward")

    @cached_property
    @Allocating("the pattern")
    def pattern(self) -> Pattern:
        """Where the transposed Jacobian may have nonzeros."""
        return self._equations.pattern

    @property
    def nnz(self) -> int:
        """Entries of the pattern."""
        return self.pattern.nnz

    @cached_property
    @Allocating("the patterns of the factors")
    def implicit_pattern(self) -> ImplicitPattern:
        """Patterns of the factors of the transposed Jacobian, as an implicit step applies them.

        ``(∂s_t/∂s_{t-1})ᵀ = W D`` with sparse slopes ``D`` and weights ``W`` that all steps and
        samples share. A linear scan over both factors reads far less memory than a scan over their
        products. If the step multiplies vectors that it has computed itself, each further stage has
        two more factors.
        """
        return self._equations.implicit_pattern

    @Allocating("the next state")
    @quiet
    def forward(self, x: Array, state: Array) -> Array:
        """Compute the next state.

        Parameters
        ----------
        x : array_like of float32 or float64, shape (…, input_size)
            The input ``x_t``, of NumPy or CuPy.
        state : array_like, shape (…, state_size)
            The state ``s_{t-1}``.

        Returns
        -------
        ndarray, shape (…, state_size)
            The state ``s_t``, of the dtype to which all arrays promote.

        Raises
        ------
        InputError, InputTypeError
            If a shape or a dtype is wrong.
        DeviceError
            If the arrays and the parameters are not in one place.
        """
        xp, lead, (x, state) = read_arrays(self, x=x, state=state)
        out = xp.empty(state.shape, state.dtype)
        self._equations.forward(xp, self.params, x, state, out)
        return out.reshape(*lead, self.state_size)

    @Allocating("the states of a sequence")
    @quiet
    def unroll(self, x: Array, state: Array = None) -> Array:
        """Compute all states of a sequence, one step after the other.

        Parameters
        ----------
        x : array_like, shape (T, …, input_size)
            The inputs ``x_1, …, x_T``.
        state : array_like, shape (…, state_size), optional
            The state ``s_0``; by default zeros, or parameters (:class:`.Initial`).

        Returns
        -------
        ndarray, shape (T + 1, …, state_size)
            The states ``s_0, …, s_T``.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`forward`; or if there are more units than a GPU's kernels take, as for
            :meth:`.TrainingStep.forward`.
        MemoryLimitError
            If the states would take more memory than there is.
        """
        x = read_array("x", x)
        x, width = filled_up(self, x, 0), width_of(OneCell(self))
        if x.ndim < 2 or x.shape[-1] != width:
            raise InputError(f"x has shape {x.shape}; expected (T, …, {width})")
        steps, lead = x.shape[0], x.shape[1:-1]
        if state is None and (begins := begins_of(type(self), self.program.states)):
            about = self.program.states, [self.params], (*lead, self.hidden_size)
            state = initial_states(namespace(x), begins, *about)[0]
        elif state is None:
            state = namespace(x).zeros((*lead, self.state_size), x.dtype)
        state = read_array("state", state)
        check_state(state, (*lead, self.state_size), x)
        _, dtype = place_of(self, x, state)
        batch = math.prod(lead)
        x = for_kernels(x.reshape(steps, batch, width), dtype)
        first = for_kernels(state.reshape(batch, self.state_size), dtype)
        return unroll(self, x, first).reshape(steps + 1, *lead, self.state_size)

    def training_step(self, **options: Unpack[OptionsDict]) -> TrainingStep:
        """Return a training step, which runs whole sequences by compiled kernels.

        Parameters
        ----------
        **options
            `memory_limit`, `truncate` and `return_states`, as for :class:`.TrainingStep`.

        Returns
        -------
        TrainingStep
            It runs this cell as one layer, and its gradients have the names of the cell's
            parameters. Use :class:`Recurrent` for layers and directions.

        Raises
        ------
        InputError, InputTypeError
            If an option is wrong, as for :class:`.TrainingStep`.
        """
        return TrainingStep(OneCell(self), **options)

    def stream(self, batch: int = 1, *, head: Iterable[Any] = ()) -> Stream:
        """Return a stream, which runs this cell on some steps at a time.

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
        from .streams import Stream

        return Stream(OneCell(self), batch, head)

    @Allocating("the linearization")
    def linearize(self, x: Array, state: Array) -> Linearization:
        """Compute the derivatives of all steps once, for several calls of a backward pass.

        Parameters
        ----------
        x, state
            As for :meth:`values`.

        Returns
        -------
        Linearization
            It has the cell's methods, without `x` and `state`. Do not change the parameters while
            you use it.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`forward`.

        Notes
        -----
        The gates are recomputed for all steps at once: BPPSA (MLSys 2020), Appendix E.
        """
        xp, lead, (x, state) = read_arrays(self, x=x, state=state)
        return Linearization(self, xp, lead, x, state)

    @Allocating("the values")
    def values(self, x: Array, state: Array, *, out: Array = None) -> Array:
        """Compute the values of ``(∂s_t/∂s_{t-1})ᵀ``, in the order of the pattern.

        Parameters
        ----------
        x : array_like, shape (…, input_size)
            The inputs ``x_t``.
        state : array_like, shape (…, state_size)
            The states BEFORE each step: ``states[:-1]`` of what :meth:`unroll` returned.
        out : ndarray, optional
            Where to write the values: contiguous, of the shape and dtype that is returned.

        Returns
        -------
        ndarray, shape (…, nnz)
            Values of all steps and samples, in the order of time: for scans with ``reverse=True``.

        Raises
        ------
        InputError, InputTypeError
            If a shape or a dtype is wrong.
        DeviceError
            If the arrays and the parameters are not in one place.
        MemoryLimitError
            If the values would take more memory than there is.

        See Also
        --------
        linearize : Compute the gates once for the values and for the gradients.
        """
        xp, lead, (x, state) = read_arrays(self, x=x, state=state)
        apart = [x, state, *self.params.values()]
        room = values_room(self, xp, lead, state.dtype, out, apart)
        if room.size > 0:
            Linearization(self, xp, lead, x, state).fill(room)
        return room if out is None else out

    def jacobian(self, x: Array, state: Array) -> sp.csr_array | BatchedCSR | CSRChain:
        """Return the transposed Jacobian ``(∂s_t/∂s_{t-1})ᵀ``.

        Parameters
        ----------
        x, state
            As for :meth:`values`, with at most two axes before the last: ``(batch,)`` or
            ``(T, batch)``.

        Returns
        -------
        csr_array, BatchedCSR or CSRChain
            A csr_array for no such axis, a BatchedCSR for one, a CSRChain for two. A chain runs
            from the LAST step to the first, for :func:`sparsescan.exclusive_scan`.

        Raises
        ------
        InputError, InputTypeError, DeviceError, MemoryLimitError
            As :meth:`values`.
        """
        state = read_array("state", state)
        if state.ndim > 3:
            raise InputError(
                f"state has {state.ndim} axes; expected at most (T, batch, state_size)"
            )
        return self.linearize(x, state).jacobian()

    @Allocating("the gradients of the parameters")
    def param_grads(self, x: Array, state: Array, grad_state: Array) -> dict[str, Array]:
        """Return the gradients of the loss in the parameters, summed over all steps and samples.

        ``∇θ = Σ_t (∂s_t/∂θ)ᵀ ∇s_t``: equation 2 of BPPSA (MLSys 2020).

        Parameters
        ----------
        x, state
            As for :meth:`values`.
        grad_state : array_like, shape (…, state_size)
            Gradients ``∇s_t`` in the states AFTER each step, in the order of time, as scans with
            ``reverse=True`` return them.

        Returns
        -------
        dict of str to ndarray
            The gradient of each parameter, in its shape.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`forward`.
        """
        xp, lead, (x, state, grad) = read_arrays(self, x=x, state=state, grad_state=grad_state)
        return Linearization(self, xp, lead, x, state).sum_params(grad)

    @Allocating("the gradients of the input")
    def input_grads(self, x: Array, state: Array, grad_state: Array) -> Array:
        """Return the gradients of the loss in the inputs: ``(∂s_t/∂x_t)ᵀ ∇s_t``.

        Parameters
        ----------
        x, state, grad_state
            As for :meth:`param_grads`.

        Returns
        -------
        ndarray, shape (…, input_size)
            The gradients ``∇x_t``, which the layer below needs.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            As :meth:`forward`.
        """
        xp, lead, (x, state, grad) = read_arrays(self, x=x, state=state, grad_state=grad_state)
        return Linearization(self, xp, lead, x, state).pull_inputs(grad)

    def restrict(self, units: slice) -> CellUnits:
        """Return a part of this cell, which computes some hidden units from the whole state.

        Parameters
        ----------
        units : slice
            Which units.

        Returns
        -------
        CellUnits
            The part, with a copy of its rows of the parameters.

        Raises
        ------
        InputError
            If the state has more than the hidden units, the step multiplies vectors that it has
            computed itself, or a parameter does not belong to single units.
        """
        return CellUnits(self, units)

    def __repr__(self) -> str:
        defaults = read_options(type(self), {})
        chosen = [f"{k}={v!r}, " for k, v in self.options.items() if v != defaults[k]]
        sizes = f"{self.input_size}, {self.hidden_size}, {''.join(chosen)}nnz={self.nnz}"
        return f"{type(self).__name__}({sizes})"

    def __str__(self) -> str:
        return "\n".join([repr(self), *describe(self._code)])
