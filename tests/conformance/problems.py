"""Calls of each operation: drawn arguments, a plain formula of PyTorch, and the doors' functions.

Formulas loop over steps in float64 and use nothing of sparsescan, so that autograd makes of them
what any derivative of a call is compared with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from plain_attention import plain_attention
from plain_filters import changing, stacked
from plain_networks import plain_run
from some_cells import CELLS, Begun, ByHeads, Driven, Elementwise, Leaky, Narrow, Normalised
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import pad
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence

import sparsescan
import sparsescan.jax
import sparsescan.torch
from sparsescan import Pattern
from sparsescan.recurrent import GRU, LSTM, RNN, Recurrent
from sparsescan.recurrent.further import of_network
from sparsescan.simulate import TimeSteps
from sparsescan.symbolic.pattern import of_mask

Array = NDArray[Any]
Numbers = dict[str, Any]
Call = Callable[[Numbers, Numbers], Any]


class Problem(NamedTuple):
    """A call of an operation.

    Attributes
    ----------
    numbers : dict of str to ndarray
        Arguments that have gradients, of double precision.
    flags : dict of str to ndarray
        Arguments that have none: lengths and resets.
    plain : callable
        A formula of numbers and flags, as tensors, that returns a tuple of tensors.
    ours : dict of str to callable
        The same of each door, for its own arrays. That of NumPy returns a function, too, which
        takes gradients in all results and returns those in the numbers by name.
    is_one_graph : bool
        Whether ``torch.compile`` makes one graph of it.
    """

    numbers: Numbers
    flags: Numbers
    plain: Call
    ours: dict[str, Call]
    is_one_graph: bool = True


class Wish(NamedTuple):
    """What a drawn call has to have; what is None is drawn, too."""

    is_real: bool | None = None

    has_lengths: bool | None = None
    has_resets: bool | None = None
    has_masks: bool | None = None
    samples: int | None = None
    steps: int | None = None
    shortest: int = 1
    has_layers: bool = True


def _steps(rng: np.random.Generator, wish: Wish) -> int:
    return int(rng.choice([1, 2, 4])) if wish.steps is None else wish.steps


def _samples(rng: np.random.Generator, wish: Wish) -> int:
    return int(rng.choice([1, 3])) if wish.samples is None else wish.samples


def _not(wish: bool | None) -> bool | None:
    return None if wish is None else not wish


def _chosen(rng: np.random.Generator, wish: bool | None) -> bool:
    return bool(rng.random() < 0.3) if wish is None else wish


# -- Recurrent networks ----------------------------------------------------------------------------

KINDS: dict[str, Any] = {"RNN": RNN, "GRU": GRU, "LSTM": LSTM}
OTHERS = CELLS | {each.__name__: each for each in (Normalised, ByHeads, Driven, Begun, Narrow)}


def _behind(state: Tensor) -> Tensor:
    """Return states of 2 and 3 numbers as two of 3."""
    return torch.cat([pad(state[..., :2], (0, 1)), state[..., 2:]], -1)


def recurrent(rng: np.random.Generator, wish: Wish) -> Problem:
    """Draw a network of PyTorch's cells or of others, with layers and directions."""
    name = str(rng.choice([*KINDS, *OTHERS]))
    inputs, units, layers, both = 2, 3, int(rng.integers(1, 3)), bool(rng.integers(2))
    if name == "ByHeads":
        units = 6
    if not wish.has_layers:
        layers, both = 1, False
    if OTHERS.get(name) in (Leaky, Elementwise):  # they read inputs elementwise
        inputs, layers, both = units, 1, False
    steps, batch = _steps(rng, wish), _samples(rng, wish)
    about: Any = (inputs, units, layers)
    options: dict[str, Any] = {"bidirectional": both, "dtype": np.float64}

    def made(**more: Any) -> Any:
        if name in KINDS:
            return KINDS[name](*about, **options, **more)
        return Recurrent(OTHERS[name], *about, **options, **more)

    masks = {}
    if _chosen(rng, wish.has_masks) and "weight_hh_l0" in made().params:
        like = made().params["weight_hh_l0"]
        masks["weight_hh_l0"] = rng.random(like.shape) < rng.choice([0.1, 0.6])
    net = made(masks=masks, rng=rng)
    rows = layers * (1 + both), batch, net.state_size
    numbers = dict(net.params) | {
        "x": rng.standard_normal((steps, batch, inputs)),
        "state": rng.standard_normal(rows),
    }
    if name == "Begun" and rng.integers(3):
        del numbers["state"]
    shapes: Any = [(steps, batch, units), (steps, batch, 1), (batch, units), (units,)]
    is_counted = name == "Begun"
    further = [] if is_counted else [each.name for each in of_network(net)]
    for key in further:
        numbers[key] = rng.standard_normal(shapes[rng.integers(len(shapes))])
    flags: Numbers = {}
    if _chosen(rng, wish.has_lengths) and steps and batch:
        flags["lengths"] = rng.integers(wish.shortest, steps + 1, batch)
        flags["lengths"][: batch // 2] = steps
    if _chosen(rng, wish.has_resets):
        flags["resets"] = rng.random((steps, batch)) < 0.4
        if rng.integers(2):
            numbers["anew"] = rng.standard_normal(rows)
    params = list(net.params)
    kept = {key: torch.from_numpy(mask) for key, mask in masks.items()}

    def plain(numbers: Numbers, flags: Numbers) -> Any:
        own = {key: numbers[key] * kept.get(key, 1) for key in params}
        own |= {key: numbers[key].expand(steps, batch, units) for key in further}
        counts = flags.get("lengths", torch.full((batch,), steps))
        state, anew = numbers.get("state"), numbers.get("anew")
        if is_counted:
            count = torch.arange(steps)[:, None, None].expand(steps, batch, units)
            own |= {each.name: count.to(numbers["x"]) for each in of_network(net)}
            begins = [each for key, each in own.items() if key.startswith("begin")]
            zeros = torch.zeros(rows).to(numbers["x"])
            begin = zeros + torch.cat([torch.stack(begins) * 0, torch.stack(begins)], -1)[:, None]
            state, anew = (begin if each is None else each for each in (state, anew))
        assert state is not None
        if not steps:
            return numbers["x"].new_zeros(0, batch, sizes[0] * (1 + both)), state.clone()
        if name == "Narrow":
            state, anew = (each if each is None else _behind(each) for each in (state, anew))
            for key in own:
                if key.startswith("weight_ih_l1"):
                    own[key] = pad(own[key].unflatten(-1, (-1, 2)), (0, 1)).flatten(-2)
        kind = name if name in KINDS else OTHERS[name]
        outputs, last = plain_run(
            *(kind, own, numbers["x"], state, counts),
            *(flags.get("resets"), anew),
        )
        if name == "Narrow":
            outputs[0] = outputs[0].unflatten(-1, (-1, 3))[..., :2].flatten(-2)
            last = torch.cat([last[..., :2], last[..., 3:]], -1)
        return outputs[0], last

    def by_numpy(numbers: Numbers, flags: Numbers) -> Any:
        for key in params:
            setattr(net, key, numbers[key])
        step = net.training_step()
        marks = flags.get("lengths"), flags.get("resets"), numbers.get("anew")
        given = {key: numbers[key] for key in further}
        results = step.forward(numbers["x"], numbers.get("state"), *marks, **given)

        def pull(above: Array, carry: Array) -> Numbers:
            grads = step.backward(above, carry)
            own = {"x": grads.input, "state": grads.state, "anew": grads.reset_states}
            return own | grads.params | (grads.further or {})

        return results, pull

    def by_jax(numbers: Numbers, flags: Numbers) -> Any:
        own = {key: numbers[key] for key in params}
        given = {key: numbers[key] for key in further}
        marks = flags.get("lengths"), flags.get("resets"), numbers.get("anew")
        about = numbers["x"], numbers.get("state")
        return sparsescan.jax.recurrent(net, own, *about, *marks, **given)

    kind = (
        getattr(sparsescan.torch, name) if name in KINDS else sparsescan.torch.module(OTHERS[name])
    )

    def module() -> Any:
        found = kind(*about, bidirectional=both, dtype=torch.float64)
        for key, mask in kept.items():
            prune.custom_from_mask(found, key, mask)
        return found

    # A thread calls its own: `functional_call` exchanges the parameters of a module for a while.
    first, modules = module(), {}

    def own_module() -> Any:
        if torch.compiler.is_compiling() or threading.current_thread() is threading.main_thread():
            return first
        return modules.setdefault(threading.get_ident(), module())

    sizes = [2, units] if name == "Narrow" else [units] * net.cells[0][0].program.states
    # Places of rows among all, as they are packed: packing is no part of what is differentiated.
    skeleton: Any = None
    if "lengths" in flags and wish.shortest:
        places = torch.arange(steps * batch).reshape(steps, batch)
        lengths = torch.from_numpy(flags["lengths"])
        skeleton = pack_padded_sequence(places, lengths, enforce_sorted=False)

    def parts(state: Tensor | None) -> Any:
        return state if state is None or len(sizes) == 1 else state.split(sizes, -1)

    def by_torch(numbers: Numbers, flags: Numbers) -> Any:
        own = {key + "_orig" * (key in kept): numbers[key] for key in params}
        x, marks = numbers["x"], {key: numbers[key] for key in further}
        if "resets" in flags:
            marks["resets"] = flags["resets"]
        if "anew" in numbers:
            marks["reset_states"] = parts(numbers["anew"])
        if skeleton is not None:
            x = skeleton._replace(data=x.flatten(0, 1)[skeleton.data])
            for key in further:
                rows = marks[key].expand(steps, batch, units).flatten(0, 1)
                marks[key] = skeleton._replace(data=rows[skeleton.data])
            if "resets" in marks:
                marks["resets"] = skeleton._replace(data=flags["resets"].flatten()[skeleton.data])
        output, last = functional_call(own_module(), own, (x, parts(numbers.get("state"))), marks)
        if skeleton is not None:
            padded = output.data.new_zeros(steps * batch, output.data.shape[-1])
            padded = padded.index_copy(0, skeleton.data, output.data)
            output = padded.reshape(steps, batch, -1)
        return output, torch.cat(last, -1) if len(sizes) > 1 else last

    doors = {"NumPy": by_numpy, "PyTorch": by_torch, "JAX": by_jax}
    return Problem(numbers, flags, plain, doors)


# -- Linear recurrences ----------------------------------------------------------------------------


def affine_scan(rng: np.random.Generator, wish: Wish) -> Problem:
    """Draw matrices of any form, any of which steps or samples may share."""
    # Of one number, all forms are diagonals; `test_affine.py` has these.
    steps, batch, size = _steps(rng, wish), _samples(rng, wish), int(rng.choice([2, 3]))
    is_complex, transposed = _chosen(rng, _not(wish.is_real)), bool(rng.integers(2))
    form = str(rng.choice(["dense", "diagonal", "sparse", "number"]))
    is_one, has_batch = bool(rng.random() < 0.3), bool(rng.integers(2))
    kept = {
        "dense": np.ones((size, size), bool),
        "sparse": np.tri(size, dtype=bool)[::-1].copy(),
    }.get(form, np.eye(size, dtype=bool))
    pattern = {"dense": Pattern.dense((size, size)), "sparse": of_mask(kept)}.get(form)
    pattern = Pattern.diagonal(size) if form == "diagonal" else pattern
    own = {"dense": (size, size), "number": (1,)}.get(form, (int(kept.sum()),))
    lead = (1 if is_one else steps, *([batch] * has_batch))

    def normal(*shape: int) -> Array:
        drawn = rng.standard_normal(shape) / 2
        return drawn + 0.5j * rng.standard_normal(shape) if is_complex else drawn

    numbers = {"matrices": normal(*lead, *own)}
    for name, axes, is_needed in (
        ("offsets", (steps,), is_one or form == "number"),
        ("initial", (), False),
    ):
        choice = rng.integers(2 if is_needed else 3)
        if choice < 2:
            shared = choice and wish.samples != 0
            numbers[name] = normal(*axes, *(() if shared else (batch,)), size)
    places = np.argwhere(kept)
    options: Any = {"pattern": pattern, "transposed": transposed}

    def plain(numbers: Numbers, flags: Numbers) -> Any:
        a = numbers["matrices"]
        if form == "number":
            a = a[..., None] * torch.eye(size, dtype=a.dtype)
        elif form != "dense":
            ones = np.zeros((len(places), size, size))
            ones[(np.arange(len(places)), *places.T)] = 1
            a = torch.einsum("...e,eij->...ij", a, torch.tensor(ones, dtype=a.dtype))
        a = a.mT if transposed else a
        y, states = numbers.get("initial", a.new_zeros(size)), []
        for t in range(steps):
            y = torch.einsum("...ij,...j->...i", a[t % len(a)], y)
            y = y + numbers["offsets"][t] if "offsets" in numbers else y
            states.append(y)
        if not steps:
            shapes = [a.shape[1:-1], y.shape, numbers.get("offsets", y[None]).shape[1:]]
            return (a.new_zeros(0, *np.broadcast_shapes(*shapes)),)
        return (torch.stack(torch.broadcast_tensors(*states)),)

    def by_numpy(numbers: Numbers, flags: Numbers) -> Any:
        states = sparsescan.affine_scan(**numbers, **options)

        def pull(above: Array) -> Numbers:
            grads = sparsescan.affine_scan_vjp(
                numbers["matrices"],
                initial=numbers.get("initial"),
                states=states,
                grads=above,
                **options,
            )
            found = grads._asdict()
            for name, axis in (("offsets", 1), ("initial", 0)):
                # Samples that share a vector have one gradient each.
                if name in numbers and found[name].ndim > numbers[name].ndim:
                    found[name] = found[name].sum(axis)
            return found

        return (states,), pull

    def at(door: Any) -> Call:
        return lambda numbers, flags: (door.affine_scan(**numbers, **options),)

    doors = {"PyTorch": at(sparsescan.torch), "JAX": at(sparsescan.jax)}
    return Problem(numbers, {}, plain, {"NumPy": by_numpy} | doors)


# -- Recursive filters -----------------------------------------------------------------------------


def _with_delays(b: Tensor, a: Tensor, x: Tensor, zi: Tensor) -> tuple[Tensor, Tensor]:
    """Filter along the last axis by the transposed direct form II, whose delays are returned."""
    order = zi.shape[-1]
    b, a = (pad(each / a[0], (0, order + 1 - len(each))) for each in (b, a))
    delays, y = list(zi.unbind(-1)), []
    for t in range(x.shape[-1]):
        y.append(b[0] * x[..., t] + (delays[0] if order else 0))
        after = [*delays[1:], 0]
        delays = [b[k + 1] * x[..., t] - a[k + 1] * y[-1] + after[k] for k in range(order)]
    return stacked(y, x * b[0]), torch.stack(delays, -1) if order else zi


def lfilter(rng: np.random.Generator, wish: Wish) -> Problem:
    """Draw coefficients that are constant, or change with steps or samples, and an axis."""
    steps, batch = _steps(rng, wish), _samples(rng, wish)
    changes = bool(rng.integers(2))
    are_complex = _chosen(rng, _not(wish.is_real)), _chosen(rng, _not(wish.is_real))
    taps = [int(n) for n in rng.choice([1, 2, 4], 2)]
    axes = (batch, 2) if rng.integers(2) else (batch,)
    axis = int(rng.integers(-len(axes) - 1, 0))

    def normal(is_complex: bool, *shape: int) -> Array:
        drawn = rng.standard_normal(shape) / 2
        return drawn + 0.5j * rng.standard_normal(shape) if is_complex else drawn

    def placed(row: int) -> tuple[int, ...]:
        """Return the shape of samples with an axis of so many."""
        shape = [*axes]
        shape.insert(axis + len(shape) + 1, row)
        return tuple(shape)

    def coefficients(count: int) -> Array:
        if not changes:
            return normal(are_complex[0], count)
        own = (*axes, steps) if rng.integers(2) else (steps if rng.integers(2) else 1,)
        return normal(are_complex[0], *own, count)

    numbers = {"b": coefficients(taps[0]), "a": coefficients(taps[1]) / max(taps)}
    numbers["a"][..., 0] += 2
    numbers["x"] = normal(are_complex[1], *placed(steps))
    if not changes and rng.integers(2):
        numbers["zi"] = normal(are_complex[1], *placed(max(taps) - 1))

    def plain(numbers: Numbers, flags: Numbers) -> Any:
        b, a, x = (numbers[name] for name in "bax")
        x = x.movedim(axis, -1)
        if changes:
            b, a = (each if each.dim() > 1 else each[None] for each in (b, a))
            return (changing(b, a, x).movedim(-1, axis),)
        has_zi = "zi" in numbers
        zi = (
            numbers["zi"].movedim(axis, -1) if has_zi else x.new_zeros(*x.shape[:-1], max(taps) - 1)
        )
        # All that enters promotes the last delays, without steps, too.
        zi = zi.to(torch.result_type(b, zi))
        both = [each.movedim(-1, axis) for each in _with_delays(b, a, x, zi)]
        return both if has_zi else both[:1]

    return Problem(numbers, {}, plain, _filters("lfilter", axis))


def sosfilt(rng: np.random.Generator, wish: Wish) -> Problem:
    """Draw a cascade of sections, and an axis."""
    steps, batch, sections = _steps(rng, wish), _samples(rng, wish), int(rng.integers(1, 3))
    axis = int(rng.integers(-2, 0))
    sos = rng.standard_normal((sections, 6)) / 4
    sos[:, 3] += 2
    numbers = {"sos": sos, "x": rng.standard_normal((batch, steps)[:: 1 if axis == -1 else -1])}
    if rng.integers(2):
        own = (batch, 2)[:: 1 if axis == -1 else -1]
        numbers["zi"] = rng.standard_normal((sections, *own))

    def plain(numbers: Numbers, flags: Numbers) -> Any:
        x, finals = numbers["x"].movedim(axis, -1), []
        for k, each in enumerate(numbers["sos"]):
            has_zi = "zi" in numbers
            zi = numbers["zi"][k].movedim(axis, -1) if has_zi else x.new_zeros(*x.shape[:-1], 2)
            x, final = _with_delays(each[:3], each[3:], x, zi)
            finals.append(final.movedim(-1, axis))
        y = x.movedim(-1, axis)
        return (y, torch.stack(finals)) if "zi" in numbers else (y,)

    return Problem(numbers, {}, plain, _filters("sosfilt", axis))


def _filters(name: str, axis: int) -> dict[str, Call]:
    def at(door: Any) -> Call:
        def call(numbers: Numbers, flags: Numbers) -> Any:
            found = getattr(door, name)(**numbers, axis=axis)
            return found if "zi" in numbers else (found,)

        return call

    return {"PyTorch": at(sparsescan.torch), "JAX": at(sparsescan.jax)}


# -- Selective scans -------------------------------------------------------------------------------


def selective_scan(rng: np.random.Generator, wish: Wish) -> Problem:
    """Draw factors of channels, of samples or of groups, and some of what may be missing."""
    steps, batch, channels, states = _steps(rng, wish), _samples(rng, wish), 4, 2
    softplus = bool(rng.integers(2))
    whole = batch, channels, steps
    factors = (channels, states), (batch, states, steps), (batch, 2, states, steps)
    numbers = {
        "u": rng.standard_normal(whole),
        "delta": np.abs(rng.standard_normal(whole)) / 2,
        "A": -rng.random((channels, states)),
        "B": rng.standard_normal(factors[rng.integers(3)]),
        "C": rng.standard_normal(factors[rng.integers(3)]),
    }
    more = {"D": (channels,), "z": whole, "delta_bias": (channels,)}
    more["initial_state"] = batch, channels, states
    numbers |= {name: rng.random(shape) for name, shape in more.items() if rng.random() < 0.6}

    def plain(numbers: Numbers, flags: Numbers) -> Any:
        u, delta, A = (numbers[name] for name in ("u", "delta", "A"))

        def at(name: str, t: int) -> Tensor:
            """Return a factor at a step, (batch or 1, channels, states)."""
            factor = numbers[name]
            if factor.dim() == 2:
                return factor[None]
            factor = factor if factor.dim() == 4 else factor[:, None]
            return factor[..., t].repeat_interleave(channels // factor.shape[1], 1)

        if "delta_bias" in numbers:
            delta = delta + numbers["delta_bias"][:, None]
        delta = torch.nn.functional.softplus(delta) if softplus else delta
        state, y = numbers.get("initial_state", u.new_zeros(batch, *A.shape)), []
        for t in range(steps):
            size = delta[..., t, None]
            state = torch.exp(size * A) * state + size * at("B", t) * u[..., t, None]
            y.append((state * at("C", t)).sum(-1))
        out = stacked(y, u)
        out = out + numbers["D"][:, None] * u if "D" in numbers else out
        z = numbers.get("z")
        return (out if z is None else out * z * torch.sigmoid(z)), state

    def at(door: Any) -> Call:
        options: Any = {"delta_softplus": softplus, "return_last_state": True}
        return lambda numbers, flags: door.selective_scan(**numbers, **options)

    doors = {"PyTorch": at(sparsescan.torch), "JAX": at(sparsescan.jax)}
    return Problem(numbers, {}, plain, doors)


# -- Linear attention ------------------------------------------------------------------------------


def linear_attention(rng: np.random.Generator, wish: Wish) -> Problem:
    """Draw decay of heads, of keys or none, and some of what may be missing."""
    steps, batch, heads = _steps(rng, wish), _samples(rng, wish), int(rng.integers(1, 3))
    keys, values = (int(n) for n in rng.choice([1, 3, 5], 2))
    keys, values = (25, 9) if wish.samples == 40 else (keys, values)
    whole = batch, steps, heads, keys
    numbers = {name: rng.standard_normal(whole) for name in "qk"}
    numbers["v"] = rng.standard_normal((*whole[:3], values))
    axes = int(rng.integers(2, 5))
    if axes > 2:
        shared = [size if rng.random() < 0.7 and size else 1 for size in whole[:axes]]
        numbers["decay"] = rng.uniform(0.3, 1, shared)
    if rng.random() < 0.5:
        numbers |= {name: rng.standard_normal(whole) / (1 + keys) for name in "ab"}
    more = {"bonus": (heads, keys), "initial_state": (batch, heads, keys, values)}
    numbers |= {name: rng.random(shape) for name, shape in more.items() if rng.random() < 0.5}

    def plain(numbers: Numbers, flags: Numbers) -> Any:
        return plain_attention(**numbers)

    def by_numpy(numbers: Numbers, flags: Numbers) -> Any:
        results = sparsescan.linear_attention(**numbers, return_last_state=True)

        def pull(above: Array, last: Array) -> Numbers:
            grads = sparsescan.linear_attention_vjp(**numbers, grads=above, grads_last=last)
            return grads._asdict()

        return results, pull

    def at(door: Any) -> Call:
        return lambda numbers, flags: door.linear_attention(**numbers, return_last_state=True)

    doors = {"PyTorch": at(sparsescan.torch), "JAX": at(sparsescan.jax)}
    return Problem(numbers, {}, plain, {"NumPy": by_numpy} | doors)


# -- Simulations -----------------------------------------------------------------------------------

NEWTON = {"rtol": 1e-13, "atol": 1e-14}
# How much of the rate at the end of a step counts.
METHODS = {"backward_euler": 1.0, "crank_nicolson": 0.5, "euler": 0.0}


def simulate(rng: np.random.Generator, wish: Wish) -> Problem:
    """Draw a line of unknowns with a cubic decay, and a method."""
    steps, size = _steps(rng, wish), 3
    shape = (size,) if wish.samples is None else (wish.samples, size)
    method = str(rng.choice(list(METHODS)))
    coupling = np.diag(rng.standard_normal(size - 1), -1) - 2 * np.eye(size)
    numbers = {
        "u0": rng.standard_normal(shape),
        "decay": rng.uniform(0.5, 1),
        "gain": rng.uniform(0.5, 1.5, size),
        "dt": rng.uniform(0.02, 0.05, steps if rng.integers(2) and steps else ()),
    }
    numbers = {name: np.asarray(each) for name, each in numbers.items()}

    def rate(u: Any, t: Any, p: Any) -> Any:
        return p[0] * (u @ coupling.T) - p[1] * u * u * u + t

    sim, last = TimeSteps(rate, np.tri(size), method), bool(rng.integers(2))
    options: Any = {"steps": steps, **NEWTON}

    def plain(numbers: Numbers, flags: Numbers) -> Any:
        u, decay, gain, dt = (numbers[name] for name in ("u0", "decay", "gain", "dt"))
        matrix, weight = torch.from_numpy(coupling), METHODS[method]
        states, time = [u], u.new_zeros(())

        def rate(u: Tensor, t: Tensor) -> Tensor:
            return decay * (u @ matrix.T) - gain * u**3 + t

        for k in range(steps):
            h = dt[k] if dt.dim() else dt
            known = u + h * (1 - weight) * rate(u, time)
            time = time + h
            for _ in range(8 if weight else 0):  # Newton's method, which is differentiated
                wrong = u - known - h * weight * rate(u, time)
                slope = decay * matrix - torch.diag_embed(3 * gain * u**2)
                slope = torch.eye(size, dtype=u.dtype) - h * weight * slope
                u = u - torch.linalg.solve(slope, wrong[..., None])[..., 0]
            u = u if weight else known
            states.append(u)
        return (u if last else torch.stack(states),)

    def by_numpy(numbers: Numbers, flags: Numbers) -> Any:
        params = numbers["decay"], numbers["gain"]
        run = sim.forward(numbers["u0"], params, dt=numbers["dt"], **options)

        def pull(above: Array) -> Numbers:
            grads = run.backward(**{"grad_last" if last else "grad_states": above})
            own = {"u0": grads.u0, "dt": grads.dt}
            return own | dict(zip(("decay", "gain"), grads.params, strict=True))

        return (run.last if last else run.states,), pull

    def at(door: Any) -> Call:
        def call(numbers: Numbers, flags: Numbers) -> Any:
            params = numbers["decay"], numbers["gain"]
            found = door.simulate(
                sim, numbers["u0"], params, dt=numbers["dt"], last=last, **options
            )
            return (found,)

        return call

    doors = {"PyTorch": at(sparsescan.torch), "JAX": at(sparsescan.jax)}
    return Problem(numbers, {}, plain, {"NumPy": by_numpy} | doors, is_one_graph=False)


OPERATIONS: dict[str, Callable[[np.random.Generator, Wish], Problem]] = {
    each.__name__: each
    for each in (
        *(recurrent, affine_scan, lfilter, sosfilt, selective_scan, linear_attention, simulate),
    )
}
