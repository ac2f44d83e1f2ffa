"""Arrays of any form at every door: what a kernel reads at an address must be what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from odd_values import unaligned
from some_cells import MGU
from torch import nn

import sparsescan
from sparsescan import BatchedCSR, CSRChain, Pattern
from sparsescan import jacobians as layers
from sparsescan import torch as ours
from sparsescan.arrays.addresses import kernel_address
from sparsescan.kernels.addresses import address_of, row_address_of
from sparsescan.recurrent import GRU, LSTM, RNN, Recurrent
from sparsescan.simulate import TimeSteps
from sparsescan.torch.calls.recorded import addresses_of

jax = pytest.importorskip("jax")
from jax_doubles import double as double  # noqa: E402

from sparsescan import jax as for_jax  # noqa: E402

Array = np.ndarray[Any, Any]


# -- Forms -----------------------------------------------------------------------------------------
# Each makes, of an array, one of its shape in another form, and what owns the memory.


def every_second(array: Array) -> tuple[Array, Array]:
    """Leave every second number out, along each axis."""
    room = np.full([2 * n for n in array.shape], np.nan, array.dtype)
    view = room[tuple(slice(1, None, 2) for _ in array.shape)]
    view[...] = array
    return view, room


def last_strided(array: Array) -> tuple[Array, Array]:
    """Leave numbers out along the last axis, as a column of a matrix does."""
    room = np.full((*array.shape, 3), np.nan, array.dtype)
    room[..., 1] = array
    return room[..., 1], room


def backwards(array: Array) -> tuple[Array, Array]:
    """Turn each axis."""
    turn = tuple(slice(None, None, -1) for _ in array.shape)
    room = array[turn].copy()
    return room[turn], room


def expanded(array: Array) -> tuple[Array, Array]:
    """Repeat one number along the last axis."""
    room = array[..., :1].copy()
    return np.lib.stride_tricks.as_strided(room, array.shape, (*room.strides[:-1], 0)), room


def repeated(array: Array) -> tuple[Array, Array]:
    """Repeat the first entries along the first axis."""
    room = array[:1].copy()
    return np.lib.stride_tricks.as_strided(room, array.shape, (0, *room.strides[1:])), room


def transposed(array: Array) -> tuple[Array, Array]:
    """Put axes into the opposite order."""
    room = np.ascontiguousarray(array.T)
    return room.T, room


def misaligned(array: Array) -> tuple[Array, Array]:
    """Begin at an odd address."""
    view = unaligned(array)
    return view, view


def read_only(array: Array) -> tuple[Array, Array]:
    """Refuse to be written."""
    view = array.copy()
    view.setflags(write=False)
    return view, view


def inside(array: Array) -> tuple[Array, Array]:
    """Begin behind other numbers."""
    room = np.full(array.size + 3, np.nan, array.dtype)
    room[3:] = array.ravel()
    return room[3:].reshape(array.shape), room


FORMS = {
    form.__name__: form
    for form in (
        *(every_second, last_strided, backwards, expanded, repeated),
        *(transposed, misaligned, read_only, inside),
    )
}


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that PyTorch negates when it is read."""
    other = torch.complex(torch.zeros_like(tensor), -tensor)
    return other.conj().imag


def conjugated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that PyTorch conjugates when it is read."""
    return tensor.conj().resolve_conj().conj()


# -- Doors -----------------------------------------------------------------------------------------


class Door(NamedTuple):
    """Arrays by the names of arguments, and a call of them that returns all results."""

    arrays: dict[str, Array]
    call: Callable[..., Any]


def made(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, Array]:
    """Return small random numbers."""
    return {name: rng.standard_normal(shape) / 4 for name, shape in shapes.items()}


def scan_of_list(rng: np.random.Generator) -> Door:
    """Scan dense and sparse Jacobians, with gradients at each step."""
    pattern = sp.random_array((4, 4), density=0.5, rng=rng, format="csr")
    plans: dict[str, Any] = {}

    def call(grad: Any, dense: Any, more: Any, data: Any, local: Any) -> Any:
        matrix = sp.csr_array((4, 4))
        matrix.data, matrix.indices, matrix.indptr = data, pattern.indices, pattern.indptr
        chain = [dense, matrix, more, matrix]
        plan = plans.setdefault("plan", sparsescan.plan([*chain]))
        given = grad, chain
        return [
            *sparsescan.exclusive_scan(*given, local_grads=[*local]),
            *sparsescan.inclusive_scan(*given),
            *(each for _ in range(2) for each in plan.exclusive_scan(*given)),
        ]

    shapes = {"grad": (3, 4), "dense": (4, 4), "more": (3, 4, 4), "local": (4, 3, 4)}
    return Door(made(rng, **shapes) | {"data": pattern.data}, call)


def scan_of_stack(rng: np.random.Generator) -> Door:
    """Scan Jacobians in one array, twice: the second time it is read another way."""
    plan = sparsescan.plan(np.ones((5, 3, 3)))

    def call(grad: Any, stack: Any, local: Any) -> Any:
        options: dict[str, Any] = {"local_grads": local}
        some = [plan.exclusive_scan(grad, stack) for _ in range(2)]
        return [*some, sparsescan.exclusive_scan(grad, stack, **options)]

    return Door(made(rng, grad=(3,), stack=(5, 3, 3), local=(5, 3)), call)


def scan_of_patterns(rng: np.random.Generator) -> Door:
    """Scan values of one pattern, of all samples or of each."""
    pattern = Pattern(sp.random_array((4, 4), density=0.6, rng=rng, format="csr"))

    def call(grad: Any, shared: Any, own: Any) -> Any:
        chain = CSRChain.from_pattern(shared, pattern)
        batch = [BatchedCSR.from_pattern(each, pattern) for each in own]
        return [*sparsescan.exclusive_scan(grad, chain), *sparsescan.exclusive_scan(grad, batch)]

    nnz = pattern.nnz
    return Door(made(rng, grad=(3, 4), shared=(5, nnz), own=(5, 3, nnz)), call)


def affine(kind: str, dtype: Any = float) -> Callable[[np.random.Generator], Door]:
    """Return a door of linear recurrences in NumPy."""

    def door(rng: np.random.Generator) -> Door:
        options, shape = _matrices(rng, kind)

        def call(matrices: Any, offsets: Any, initial: Any, above: Any) -> Any:
            states = sparsescan.affine_scan(matrices, offsets, initial, **options)
            back = {"initial": initial, "states": states, "grads": above}
            return [states, *sparsescan.affine_scan_vjp(matrices, **back, **options)]

        arrays = made(rng, matrices=shape, offsets=(6, 3, 4), initial=(3, 4), above=(6, 3, 4))
        return Door({name: _turned(each, dtype) for name, each in arrays.items()}, call)

    return door


def _matrices(rng: np.random.Generator, kind: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    if kind == "pattern":
        pattern = Pattern(sp.random_array((4, 4), density=0.6, rng=rng, format="csr"))
        return {"pattern": pattern}, (6, 3, pattern.nnz)
    return {}, {"dense": (6, 4, 4), "diagonal": (6, 3, 4), "samples": (6, 3, 4, 4)}[kind]


def _turned(array: Array, dtype: Any) -> Array:
    return (array * (1 + 0.5j) if dtype is complex else array).astype(dtype)


def network(kind: Any, **options: Any) -> Callable[[np.random.Generator], Door]:
    """Return a door of a training step, which runs a few times, since it is recorded then."""

    def door(rng: np.random.Generator) -> Door:
        net = kind(rng)
        step = net.training_step()

        def call(x: Any, state: Any, above: Any, carry: Any, **params: Any) -> Any:
            for name, array in params.items():
                setattr(net, name, array)
            results: Any = []
            for _ in range(4):
                output, last = step.forward(x, state)
                grads = step.backward(above, carry)
                results += [output, last, grads.input, grads.state, *grads.params.values()]
            return results

        lead = net.num_layers * (1 + net.bidirectional), 3, net.state_size
        width = net.hidden_size * (1 + net.bidirectional)
        arrays = made(rng, x=(6, 3, net.input_size), state=lead, above=(6, 3, width), carry=lead)
        return Door(arrays | {name: each.copy() for name, each in net.params.items()}, call)

    return door


def layer(make: Callable[[], Any]) -> Callable[[np.random.Generator], Door]:
    """Return a door of a layer, and of a training step of a network of it."""

    def door(rng: np.random.Generator) -> Door:
        op = make()
        step = layers.Sequential([op]).training_step()

        def call(x: Any, above: Any, **params: Any) -> Any:
            for name, array in params.items():
                setattr(op, name, array)
            y = op.forward(x)
            found = [y, op.values(x, y), step.forward(x)]
            input_grad, grads = step.backward(above)
            if op.params:
                grads |= op.param_grads(x, above)
            return [*found, input_grad, *grads.values()]

        shapes = {"x": (3, *op.input_shape), "above": (3, *op.output_shape)}
        params = {name: np.asarray(each).copy() for name, each in op.params.items()}
        return Door(made(rng, **shapes) | params, call)

    return door


def rate(u: Any, t: Any, p: Any) -> Any:
    """Return the rate of change of a small system."""
    return -p * u + 0.1 * np.roll(u, 1) ** 2


def system() -> TimeSteps:
    """Return a simulation of it."""
    return TimeSteps(rate, np.eye(4) + np.roll(np.eye(4), 1, 0), "crank_nicolson")


def simulation(rng: np.random.Generator) -> Door:
    """Simulate a small system, and differentiate."""
    sim = system()

    def call(u0: Any, p: Any, above: Any) -> Any:
        run = sim.forward(u0, p, steps=5, dt=0.1)
        grads = run.backward(above)
        return [run.states, grads.u0, grads.params]

    return Door(made(rng, u0=(4,), p=(4,), above=(6, 4)), call)


# PyTorch: results, then the gradients in all that was given, from gradients of any form, too.


def autograd(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of tensors that returns gradients, too."""

    def both(above: Any, **tensors: Any) -> Any:
        leaves = {name: each.detach().requires_grad_() for name, each in tensors.items()}
        found = call(**leaves)
        found = [found] if isinstance(found, torch.Tensor) else [*found]
        params = [leaves.get(name) for name in tensors]
        loss = [each for each in found if each.requires_grad]
        given = [above, *map(torch.zeros_like, loss[1:])]
        return [*found, *torch.autograd.grad(loss, params, given)]

    return both


def in_torch(
    call: Callable[..., Any], above: tuple[int, ...], dtype: Any = float, **shapes: Any
) -> Callable[[np.random.Generator], Door]:
    """Return a door of a function of tensors."""

    def door(rng: np.random.Generator) -> Door:
        arrays = {name: _turned(each, dtype) for name, each in made(rng, **shapes).items()}
        for name in ("a", "sos"):  # recursive filters divide by the first
            if name in arrays:
                arrays[name][..., 0 if name == "a" else 3] += 2
        some = made(rng, above=above)
        return Door(arrays | {"above": _turned(some["above"], dtype)}, autograd(call))

    return door


def module_of(make: Callable[[], nn.Module]) -> Callable[[np.random.Generator], Door]:
    """Return a door of a recurrent module, with its parameters among the arrays."""

    def door(rng: np.random.Generator) -> Door:
        net: Any = make().double()
        names = [name for name, _ in net.named_parameters()]
        has_cell = isinstance(net, nn.LSTM | ours.LSTM)

        def call(above: Any, x: Any, **tensors: Any) -> Any:
            for name in names:
                setattr(net, name, nn.Parameter(tensors[name]))
            states = [tensors[name].detach().requires_grad_() for name in tensors if name in "hc"]
            given = x.detach().requires_grad_()
            results = []
            for _ in range(2):
                output, last = net(given, tuple(states) if has_cell else states[0])
                leaves = [given, *states, *net.parameters()]
                results += [output, *last, *torch.autograd.grad(output, leaves, above)]
            return results

        arrays = made(rng, x=(3, 6, 4), above=(3, 6, 5), h=(1, 3, 5))
        if has_cell:
            arrays |= made(rng, c=(1, 3, 5))
        params = {name: each.detach().numpy().copy() for name, each in net.named_parameters()}
        return Door(arrays | params, call)

    return door


def converted(rng: np.random.Generator) -> Door:
    """Return a door of a stack of layers with pruned weights."""
    net: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    nn.utils.prune.random_unstructured(net[0], "weight", 0.9)
    ours.convert(net)
    names = [name for name, _ in net.named_parameters()]

    def call(above: Any, x: Any, **tensors: Any) -> Any:
        for name in names:
            place, own = name.split(".")
            setattr(net[int(place)], own, nn.Parameter(tensors[name.replace(".", "_")]))
        results = []
        for _ in range(2):
            given = x.detach().requires_grad_()
            y = net(given)
            results += [y, *torch.autograd.grad(y, [given, *net.parameters()], above)]
        return results

    params = {
        name.replace(".", "_"): each.detach().numpy().copy()
        for name, each in net.named_parameters()
    }
    return Door(made(rng, x=(5, 6), above=(5, 3)) | params, call)


# JAX: results and gradients, from NumPy's arrays, which it may take as they are.


def in_jax(call: Callable[..., Any], **shapes: Any) -> Callable[[np.random.Generator], Door]:
    """Return a door of a function of JAX's arrays."""

    def door(rng: np.random.Generator) -> Door:
        arrays = made(rng, **shapes)
        for name in ("a", "sos"):
            if name in arrays:
                arrays[name][..., 0 if name == "a" else 3] += 2

        def loss(given: Any) -> Any:
            return sum((each**2).sum() for each in jax.tree.leaves(call(**given)))

        grads = jax.jit(jax.grad(loss))
        return Door(
            arrays,
            lambda **given: [*jax.tree.leaves(call(**given)), *jax.tree.leaves(grads(given))],
        )

    return door


NET = GRU(4, 5, rng=0)
SHAPES: dict[str, Any] = {
    "lfilter": {"b": (3,), "a": (4,), "x": (3, 9)},
    "lfilter of changes": {"b": (9, 3), "a": (3, 9, 2), "x": (3, 9)},
    "lfilter with delays": {"b": (3,), "a": (4,), "x": (3, 9), "zi": (3, 3)},
    "sosfilt": {"sos": (2, 6), "x": (3, 9)},
    "selective_scan": {
        "u": (2, 4, 7),
        "delta": (2, 4, 7),
        "A": (4, 3),
        "B": (2, 3, 7),
        "C": (2, 2, 3, 7),
        "D": (4,),
        "z": (2, 4, 7),
        "delta_bias": (4,),
        "initial_state": (2, 4, 3),
    },
    "selective_scan of constants": {
        "u": (2, 4, 7),
        "delta": (2, 4, 7),
        "A": (4, 3),
        "B": (4, 3),
        "C": (4, 3),
    },
    "linear_attention": {
        **dict.fromkeys(("q", "k", "decay", "a", "b"), (2, 7, 3, 4)),
        "v": (2, 7, 3, 5),
        "bonus": (3, 4),
        "initial_state": (2, 3, 4, 5),
    },
    "affine_scan": {"matrices": (6, 4, 4), "offsets": (6, 3, 4), "initial": (3, 4)},
    "affine_scan of diagonals": {"matrices": (6, 3, 4), "offsets": (6, 3, 4), "initial": (3, 4)},
}
RESULTS = {
    "lfilter": (3, 9),
    "sosfilt": (3, 9),
    "selective_scan": (2, 4, 7),
    "linear_attention": (2, 7, 3, 5),
    "affine_scan": (6, 3, 4),
}


def _doors() -> Iterator[tuple[str, Callable[[np.random.Generator], Door]]]:
    yield "scan of a list", scan_of_list
    yield "scan of a stack", scan_of_stack
    yield "scan of patterns", scan_of_patterns
    for kind in ("dense", "diagonal", "samples", "pattern"):
        yield f"affine_scan, {kind}", affine(kind)
    yield "affine_scan, complex", affine("dense", complex)
    yield "affine_scan, complex diagonal", affine("diagonal", complex)
    yield "RNN", network(lambda rng: RNN(4, 5, 2, bidirectional=True, rng=rng))
    yield "GRU", network(lambda rng: GRU(4, 5, rng=rng))
    yield "LSTM", network(lambda rng: LSTM(4, 5, rng=rng))
    yield "a cell", network(lambda rng: Recurrent(MGU, 4, 5, rng=rng))
    yield "Linear", layer(lambda: layers.Linear(4, 5, rng=0))
    yield "Conv2d", layer(lambda: layers.Conv2d(2, 3, 3, input_shape=(2, 5, 4), rng=0))
    yield "BatchNorm2d", layer(lambda: layers.BatchNorm2d(2, input_shape=(2, 3, 4)))
    yield "Tanh", layer(lambda: layers.Tanh(input_shape=(4,)))
    yield "MaxPool2d", layer(lambda: layers.MaxPool2d(2, input_shape=(2, 4, 4)))
    yield "simulate", simulation
    for name, shapes in SHAPES.items():
        function = name.split()[0]
        made_of = getattr(ours, function)
        yield f"{name} in PyTorch", in_torch(made_of, RESULTS[function], **shapes)
        if function in ("affine_scan", "lfilter"):
            door = in_torch(made_of, RESULTS[function], complex, **shapes)
            yield f"complex {name} in PyTorch", door
        yield f"{name} in JAX", in_jax(getattr(for_jax, function), **shapes)
    for kind in ("RNN", "GRU", "LSTM"):
        one = getattr(ours, kind)
        yield f"{kind} in PyTorch", module_of(lambda one=one: one(4, 5, batch_first=True))
    yield "a cell in PyTorch", module_of(lambda: ours.module(MGU)(4, 5, batch_first=True))
    yield "Sequential in PyTorch", converted
    yield (
        "simulate in PyTorch",
        in_torch(
            lambda u0, p: ours.simulate(system(), u0, p, steps=5, dt=0.1), (6, 4), u0=(4,), p=(4,)
        ),
    )
    yield (
        "recurrent in JAX",
        in_jax(
            lambda x, state, **params: for_jax.recurrent(NET, params, x, state),
            x=(6, 3, 4),
            state=(1, 3, 5),
            **{name: each.shape for name, each in NET.params.items()},
        ),
    )


DOORS = dict(_doors())


# -- Tests -----------------------------------------------------------------------------------------


def _arrays(results: Any) -> list[Array]:
    return [
        each.detach().resolve_neg().resolve_conj().numpy()
        if isinstance(each, torch.Tensor)
        else np.array(each)
        for each in results
    ]


def _tensor(array: Array) -> torch.Tensor:
    """Return an array's memory, in its form, as a tensor; one that PyTorch cannot have, a copy."""
    # PyTorch (2.13) crashes in its own `pad` of complex numbers that are not aligned.
    crashes = np.iscomplexobj(array) and not array.flags.aligned
    if (
        crashes
        or not array.flags.writeable
        or any(n < 0 or n % array.itemsize for n in array.strides)
    ):
        array = array.copy()
    return torch.from_numpy(array)


@pytest.mark.parametrize("name", DOORS)
def test_every_argument_in_every_form(name: str) -> None:
    """Results are those of contiguous arrays, and what was given is as it was."""
    rng = np.random.default_rng()
    door = DOORS[name](rng)
    is_torch = name.endswith("in PyTorch")
    as_given: Any = _tensor if is_torch else lambda array: array
    for argument, array in door.arrays.items():
        pairs = {form: make(array) for form, make in FORMS.items()}
        for form, (view, room) in pairs.items():
            plain = {key: as_given(each.copy()) for key, each in door.arrays.items()}
            others = [as_given(view)]
            if is_torch and form == "every_second":
                lazy = conjugated if np.iscomplexobj(array) else negated
                others.append(lazy(as_given(view)))
            before = room.tobytes()
            expected = _arrays(door.call(**plain | {argument: as_given(view.copy(order="C"))}))
            for other in others:
                found = _arrays(door.call(**plain | {argument: other}))
                assert room.tobytes() == before, (argument, form)
                for k, (one, right) in enumerate(zip(found, expected, strict=True)):
                    assert one.dtype == right.dtype, (argument, form, k)
                    scale = 1 + np.abs(right).max(initial=0)
                    bound = 100 * np.finfo(right.dtype).eps * scale
                    np.testing.assert_allclose(
                        one, right, rtol=0, atol=bound, err_msg=f"{argument}, {form}, {k}"
                    )


@pytest.mark.parametrize("form", FORMS)
def test_gates_refuse_what_kernels_cannot_follow(form: str) -> None:
    view, _ = FORMS[form](np.ones((3, 4)))
    is_whole = view.flags.c_contiguous and view.flags.aligned
    calls: list[Callable[[Any], Any]] = [kernel_address, address_of]
    for call in calls:
        if is_whole:
            assert call(view) == view.ctypes.data
        else:
            with pytest.raises(BufferError, match="a kernel cannot follow"):
                call(view)
    by_rows: list[Callable[[Any], Any]] = [partial(kernel_address, strided=1), row_address_of]
    for call in by_rows:
        if view.strides[-1] == view.itemsize and view.flags.aligned:
            assert call(view) == view.ctypes.data
        else:
            with pytest.raises(BufferError, match="a kernel cannot follow"):
                call(view)
    tensor = _tensor(view)
    if tensor.is_contiguous():
        assert addresses_of([tensor]) == [tensor.data_ptr()]
    else:
        with pytest.raises(BufferError, match="not contiguous"):
            addresses_of([tensor])
    with pytest.raises(BufferError, match="not of dtype float32"):
        kernel_address(np.ones(3), dtype=np.float32)
