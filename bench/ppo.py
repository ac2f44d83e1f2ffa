"""Updates of recurrent PPO beside sb3-contrib, of episodes that end inside a rollout.

An update is ``RecurrentPPO.train`` with one epoch over the whole rollout: forward pass, losses,
backward pass and Adam's step. Only the method of the policy differs that runs its recurrent
networks through sequences.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

import sparsescan.torch

from . import peers, races
from .experiment import Experiment, Piece, Results, Table
from .page import significant
from .races import OURS
from .timing import Call

PEER = "sb3-contrib"
WINDOWS, AT_STARTS = "sparsescan, whole windows", "PyTorch, states begun anew at starts"
_HINT = "pip install --no-deps sb3-contrib stable-baselines3 gymnasium cloudpickle "
_HINT += "farama-notifications"
_OBSERVED, _ACTIONS, _ENVIRONMENTS = 8, 4, 8
_SHORTEST, _LONGEST = 20, 100  # steps of an episode

Process = Callable[[Tensor, Any, Tensor, Any], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Case:
    """A policy, the steps of a rollout, and how many times as long as ours the peer is to take."""

    kind: str
    hidden: int
    steps: int
    wanted: float

    @property
    def name(self) -> str:
        return f"{self.kind}({self.hidden}), {_ENVIRONMENTS} environments, {self.steps} steps"


CASES = tuple(
    Case(*network, steps, wanted)
    for *network, wanted in (("LSTM", 256, 3), ("LSTM", 64, 5), ("GRU", 64, 5))
    for steps in (128, 256)
)


# -- How sequences are processed ------------------------------------------------------------------


def with_resets(features: Tensor, states: Any, starts: Tensor, net: Any) -> tuple[Tensor, Any]:
    """Process sequences as sb3-contrib's policies do, by one call of our module.

    Parameters
    ----------
    features : Tensor, shape (sequences · steps, inputs)
    states : tuple of Tensor, shape (layers, sequences, units)
    starts : Tensor, shape (sequences · steps,)
        1 where an episode starts, elsewhere 0.
    net : module
        With the results of ``torch.nn.LSTM``, and `resets`.
    """
    x, begins = _in_steps(features, states, starts, net)
    output, states = net(x, states, resets=begins)
    return output.transpose(0, 1).flatten(0, 1), states


def at_starts(features: Tensor, states: Any, starts: Tensor, net: Any) -> tuple[Tensor, Any]:
    """Process sequences likewise, none of which starts an episode after its first step.

    Such are those that sb3-contrib cuts for an update.
    """
    x, begins = _in_steps(features, states, starts, net)
    assert not begins[1:].any(), "an episode starts inside a sequence"
    kept = (~begins[0]).to(x.dtype)[:, None]
    output, states = net(x, tuple(kept * state for state in states))
    return output.transpose(0, 1).flatten(0, 1), states


def _in_steps(features: Tensor, states: Any, starts: Tensor, net: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and starts with steps first."""
    count = states[0].shape[1]
    x = features.reshape(count, -1, net.input_size).swapaxes(0, 1)
    return x, starts.reshape(count, -1).swapaxes(0, 1) != 0


class _AsLSTM(nn.Module):
    """A GRU with the arguments and results of an LSTM, whose second state stays as it is."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, hidden)
        self.input_size, self.hidden_size, self.num_layers = inputs, hidden, 1

    def forward(self, x: Tensor, states: Any, **options: Any) -> tuple[Tensor, Any]:
        """Return outputs, and the states after them."""
        state, other = states
        output, state = self.gru(x, state, **options)
        return output, (state, other)


# -- Contenders -----------------------------------------------------------------------------------


def _load() -> SimpleNamespace:
    """Return what is used of gymnasium and sb3-contrib."""
    gym = peers.require("gymnasium", _HINT)
    vectors = peers.require("stable_baselines3.common.vec_env", _HINT)
    buffers = peers.require("sb3_contrib.common.recurrent.buffers", _HINT)
    ppo = peers.require("sb3_contrib.ppo_recurrent", _HINT)

    class Guess(gym.Env):  # type: ignore[misc]
        """Observations are noise, and an action guesses the largest of the first numbers."""

        observation_space = gym.spaces.Box(-10, 10, (_OBSERVED,), np.float32)
        action_space = gym.spaces.Discrete(_ACTIONS)

        def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
            super().reset(**given)
            self.left = int(self.np_random.integers(_SHORTEST, _LONGEST + 1))
            return self._observe(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            reward = float(action == self.seen[:_ACTIONS].argmax())
            self.left -= 1
            return self._observe(), reward, self.left == 0, False, {}

        def _observe(self) -> Any:
            noise = self.np_random.standard_normal(_OBSERVED).clip(-10, 10)
            self.seen = noise.astype(np.float32)
            return self.seen

    class Windows(buffers.RecurrentRolloutBuffer):  # type: ignore[misc]
        """A rollout whose sequences are those of environments, with all of their episodes."""

        def _get_samples(self, indices: Any, env_change: Any, env: Any = None) -> Any:
            starts, self.episode_starts = self.episode_starts, np.zeros_like(self.episode_starts)
            try:
                samples = super()._get_samples(indices, env_change, env)
            finally:
                self.episode_starts = starts
            return samples._replace(episode_starts=self.pad_and_flatten(starts[indices]))

    environments = vectors.DummyVecEnv([Guess] * _ENVIRONMENTS)
    return SimpleNamespace(ppo=ppo.RecurrentPPO, windows=Windows, environments=environments)


class _Race:
    """The contenders for one case, who update from the same parameters and the same rollout."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.learners: dict[str, Any] = {}

    @cached_property
    def _first(self) -> Any:
        """The learner that has collected the rollout."""
        loaded = self._loaded
        loaded.environments.seed(0)
        learner = self._learner()
        count = self.case.steps * _ENVIRONMENTS
        _, callback = learner._setup_learn(count)
        about = learner.env, callback, learner.rollout_buffer, self.case.steps
        learner.collect_rollouts(*about)
        return learner

    @cached_property
    def _loaded(self) -> SimpleNamespace:
        return _load()

    def _learner(self) -> Any:
        """Return one with the first parameters; it learns nothing, so that updates are alike."""
        case, loaded = self.case, self._loaded
        learner = loaded.ppo(
            "MlpLstmPolicy",
            loaded.environments,
            learning_rate=0.0,
            n_steps=case.steps,
            batch_size=case.steps * _ENVIRONMENTS,
            n_epochs=1,
            policy_kwargs={"lstm_hidden_size": case.hidden},
            seed=0,
            device="cpu",
        )
        policy = learner.policy
        if case.kind == "GRU":
            inputs = policy.lstm_actor.input_size
            policy.lstm_actor = _AsLSTM(inputs, case.hidden)
            policy.lstm_critic = _AsLSTM(inputs, case.hidden)
            kind, given = policy.optimizer_class, policy.optimizer_kwargs
            policy.optimizer = kind(policy.parameters(), lr=0.0, **given)
        return learner

    def variants(self, name: str) -> dict[str, Call]:
        """Return a contender's updates, with as many threads as there are cores and with one."""
        first, learner = self._first, self._learner()
        policy = learner.policy
        policy.load_state_dict(first.policy.state_dict())
        learner._logger = first.logger
        learner.rollout_buffer = copy.copy(first.rollout_buffer)
        if name == WINDOWS:
            learner.rollout_buffer.__class__ = self._loaded.windows
        if name in (OURS, WINDOWS):
            for net in (policy.lstm_actor, policy.lstm_critic):
                own = net.gru if self.case.kind == "GRU" else net
                done = sparsescan.torch.convert(own)
                assert done.replaced == [""], done
        process: dict[str, Process] = {
            **dict.fromkeys((OURS, WINDOWS), with_resets),
            AT_STARTS: at_starts,
        }
        if name in process:
            policy._process_sequence = process[name]
        self.learners[name] = learner

        def call() -> dict[str, Tensor]:
            _cut_alike()
            learner.train()
            return {key: each.grad for key, each in policy.named_parameters()}

        return peers.in_threads(call)

    def sequences(self) -> dict[str, list[int]]:
        """Return how many sequences contenders have, and of how many steps."""
        found = {}
        for name, learner in self.learners.items():
            _cut_alike()
            (samples,) = learner.rollout_buffer.get()
            count = samples.lstm_states.pi[0].shape[1]
            found[name] = [count, len(samples.mask) // count]
        return found


def _cut_alike() -> None:
    """Let the next update cut the rollout in two where all others do."""
    np.random.seed(0)  # noqa: NPY002


def _differences(calls: dict[str, Call]) -> dict[str, float]:
    """How far gradients are from the peer's; AssertionError if rounding does not explain it."""
    found: dict[str, float] = {}
    if PEER in calls:
        expected = {name: grad.numpy().copy() for name, grad in calls[PEER]().items()}
        for who in calls.keys() - {PEER}:
            apart = races.apart(calls[who](), expected)
            found |= {f"{name}, {who}": each for name, each in apart.items()}
    return found


def measure(case: Case, quick: bool) -> Results:
    """Return the times of updates, as :func:`bench.races.timed` does.

    Beside them are the ``differences`` of each gradient from the peer's, by the 2-norm, relative to
    it, and the ``sequences`` of each contender: how many, and of how many steps.
    """
    race = _Race(case)
    who = OURS, WINDOWS, PEER, AT_STARTS
    makers = {name: partial(race.variants, name) for name in who}
    piece = races.timed(makers, {PEER: case.wanted}, quick, _differences, few=True)
    return {**piece, "sequences": race.sequences()}


# -- The experiment -------------------------------------------------------------------------------


def _pieces(quick: bool) -> Iterable[Piece]:
    for case in CASES[:1] if quick else CASES:
        yield Piece(case.name, partial(measure, case, quick))


def _about(quick: bool) -> Results:
    return {
        "an update": "RecurrentPPO.train of sb3-contrib: one epoch over the whole rollout as one "
        "batch; forward pass, losses, backward pass and Adam's step, with a learning rate of 0, so "
        "that all updates do the same",
        "the policy": "MlpLstmPolicy: an LSTM for the actor, one for the critic, and two layers of "
        "64 units behind each; or a GRU in place of each LSTM",
        "environments": f"{_ENVIRONMENTS} that are made up, with {_OBSERVED} numbers observed and "
        f"{_ACTIONS} actions; episodes have {_SHORTEST} to {_LONGEST} steps",
        PEER: "its own code: sequences are cut where episodes start and are padded, and a loop "
        "in Python calls PyTorch's LSTM at each step",
        OURS: "the same policy and sequences, one call of a converted module with resets",
        WINDOWS: "the same policy, one call, but sequences are not cut: one for each environment, "
        "in which episodes end",
        AT_STARTS: "the same policy and sequences, one call of PyTorch's module: states begin anew "
        "before it, since sequences have no other starts; not in sb3-contrib",
        "threads": "2 or 1, whichever were faster, of each contender",
        "memory": "glibc keeps what is freed (mallopt), for all contenders",
    }


def _tables(results: Results) -> list[Table]:
    numbers = ["ms", "over ours", "asked"]
    rows = []
    for key, piece in races.races(results).items():
        medians = {name: median(taken) for name, taken in piece["samples"].items()}
        for name, taken in medians.items():
            ratio, wanted = taken / medians[OURS], piece["wanted"].get(name)
            count, steps = piece["sequences"][name]
            rows.append(
                [
                    *(key, name, f"{count} × {steps}", piece["variants"][name]),
                    *(significant(1e3 * taken), f"{ratio:.2f}"),
                    *("" if wanted is None else f"{wanted:g}",),
                    "" if wanted is None else "met" if ratio >= wanted else "missed",
                ]
            )
    heads = ["update", "contender", "sequences × steps", "variant", *numbers, ""]
    return [Table(heads, rows, numbers)]


_TITLE = "Updates of recurrent PPO"
EXPERIMENT = Experiment(
    "ppo",
    _TITLE,
    _pieces,
    _about,
    partial(races.drawings, _TITLE),
    partial(races.rows, "Update of recurrent PPO", hidden=(WINDOWS,)),
    _tables,
)
