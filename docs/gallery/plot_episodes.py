"""
Episodes that end inside a window
=================================

An agent with a recurrent network learns from windows: some steps of each of its environments, in
which episodes end and others begin. There the state has to be reset. ``resets`` tells a module of
``sparsescan.torch`` where, and one call runs all episodes of all environments. Here a GRU learns
the values of states, with these calls and with the usual loop over steps.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch

import sparsescan.torch

# %%
# The episodes
# ------------
# At its first step an episode shows a reward of -1, 0 or 1, and then hides it; it is paid at the
# last step. Each step shows how many steps are left. So the value of a state, the discounted
# reward, is the reward shown at the start, times :math:`0.98` to the power of the remaining steps.
# A critic must remember the start, but nothing before it.

STEPS, BATCH, HIDDEN, DISCOUNT = 200, 16, 32, 0.98
rng = np.random.default_rng(0)


def window(steps=STEPS, batch=BATCH):
    """Return observations, values, and which steps are the first ones of an episode."""
    shown, values = np.zeros((2, steps, batch)), np.zeros((steps, batch))
    starts = np.zeros((steps, batch), bool)
    for b in range(batch):
        begin = 0
        while begin < steps:
            length, reward = rng.integers(10, 60), rng.integers(-1, 2)
            own = slice(begin, begin + length)
            left = np.arange(length)[::-1][: steps - begin]
            shown[0, begin, b], shown[1, own, b] = reward, left / 60
            values[own, b] = reward * DISCOUNT**left
            starts[begin, b] = True
            begin += length
    seen = torch.tensor(np.moveaxis(shown, 0, -1), dtype=torch.float32)
    return seen, torch.tensor(values, dtype=torch.float32), torch.tensor(starts)


seen, values, starts = window()
print(f"{starts.sum()} episodes in {BATCH} windows of {STEPS} steps")

# %%
# Three ways to reset states
# --------------------------
# PyTorch's modules cannot reset states inside a sequence. One way is to call them step by step, and
# multiply states by 0 where an episode starts. Another is to cut all windows into episodes, pack
# these, and put the outputs back in place. ``resets`` is one argument.


def by_resets(net, seen, starts):
    """Return outputs of one call."""
    return net(seen, resets=starts)[0]


def by_loop(net, seen, starts):
    """Return outputs of a call for each step."""
    state, outputs = seen.new_zeros(1, seen.shape[1], HIDDEN), []
    for x, is_start in zip(seen, starts, strict=True):
        output, state = net(x[None], state * ~is_start[:, None])
        outputs.append(output)
    return torch.cat(outputs)


def by_cutting(net, seen, starts):
    """Return outputs of one call for episodes that are packed."""
    rows = seen.transpose(0, 1).flatten(0, 1)
    begins = starts.T.flatten()
    begins[:: len(seen)] = True  # of each environment
    where = begins.nonzero().flatten().tolist()
    lengths = [b - a for a, b in zip(where, [*where[1:], len(rows)], strict=True)]
    episodes = torch.nn.utils.rnn.pack_sequence(rows.split(lengths), enforce_sorted=False)
    outputs, _ = torch.nn.utils.rnn.pad_packed_sequence(net(episodes)[0], batch_first=True)
    outputs = torch.cat([each[:length] for each, length in zip(outputs, lengths, strict=True)])
    return outputs.unflatten(0, seen.shape[1::-1]).transpose(0, 1)


# %%
# All have the same outputs and gradients. An episode does not depend on those before it: if their
# observations change, its outputs stay the same, to the last bit.

torch.set_num_threads(1)
torch.manual_seed(0)
theirs, ours = torch.nn.GRU(2, HIDDEN), sparsescan.torch.GRU(2, HIDDEN)
ours.load_state_dict(theirs.state_dict())
ways = {
    "sparsescan, resets": (by_resets, ours),
    "PyTorch, a loop over steps": (by_loop, theirs),
    "PyTorch, episodes cut and packed": (by_cutting, theirs),
}
loss_grad = torch.randn(STEPS, BATCH, HIDDEN)
found = {}
for name, (way, net) in ways.items():
    output = way(net, seen, starts)
    found[name] = [output, *torch.autograd.grad(output, list(net.parameters()), loss_grad)]
right = found["sparsescan, resets"]
for each in found.values():
    for theirs_own, own in zip(each, right, strict=True):
        torch.testing.assert_close(own, theirs_own, rtol=1e-4, atol=1e-4 * own.abs().max().item())

other = seen.clone()
first = starts[1:, 0].nonzero()[0].item() + 1  # where the second episode of a window starts
other[:first, 0] = torch.randn(first, 2)
assert torch.equal(by_resets(ours, other, starts)[first:, 0], right[0][first:, 0])
assert not torch.equal(ours(other)[0][first:, 0], ours(seen)[0][first:, 0])

# %%
# Learning values
# ---------------
# A linear layer makes values of the outputs. With ``resets`` it learns from 500 windows. The loop
# has the same time, the same initial parameters and the same windows.

WINDOWS = 500
windows = [window() for _ in range(50)]


def train(name, limit=np.inf):
    """Return the loss of each window, the seconds that had passed after it, and the critic."""
    way, net = ways[name]
    torch.manual_seed(0)
    net = type(net)(2, HIDDEN)
    head = torch.nn.Linear(HIDDEN, 1)
    optimiser = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=5e-3)

    def critic(seen, starts):
        return head(way(net, seen, starts))[..., 0]

    losses, seconds, start = [], [], time.perf_counter()
    while not seconds or (len(losses) < WINDOWS and seconds[-1] < limit):
        seen, values, starts = windows[len(losses) % len(windows)]
        loss = (critic(seen, starts) - values).square().mean() / values.square().mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return np.array(losses), np.array(seconds), critic


with_resets, with_loop = list(ways)[:2]
runs = {with_resets: train(with_resets)}
spent = runs[with_resets][1][-1]
runs[with_loop] = train(with_loop, limit=spent)
for name, (losses, _, _) in runs.items():
    print(f"{name:<27}{len(losses):>5} windows, loss {losses[0]:.2f} to {losses[-1]:.4f}")
(our_losses, _, critic), (their_losses, _, _) = runs.values()
both = min(len(their_losses), 10)  # rounding grows slowly
np.testing.assert_allclose(our_losses[:both], their_losses[:both], rtol=1e-2)
assert our_losses[-10:].mean() < 0.1

# %%
# Time
# ----
# Forward and backward through one window. Calls take turns, and the fastest of each counts.

taken = {name: [] for name in ways}
for turn in range(6):
    for name, (way, net) in ways.items():
        start = time.perf_counter()
        way(net, seen, starts).backward(loss_grad)
        if turn:  # the first one warms up
            taken[name].append(time.perf_counter() - start)
milliseconds = {name: 1e3 * min(each) for name, each in taken.items()}
assert milliseconds[with_resets] < milliseconds[with_loop] / 3

# %%
# The upper panel shows one window, which the critic has not been trained on. Vertical lines are
# where episodes start.

fig, axes = plt.subplot_mosaic(
    [["value", "value"], ["loss", "time"]],
    figsize=(9, 5.6),
    height_ratios=[1.2, 1],
    layout="constrained",
)
seen, values, starts = window()
with torch.no_grad():
    guessed = critic(seen, starts)
over = axes["value"]
for begin in starts[:, 0].nonzero().flatten().tolist():
    over.axvline(begin, color="0.8", lw=1, zorder=0)
over.plot(guessed[:, 0], color="#d55e00", lw=1.6, label="critic")
over.plot(values[:, 0], color="black", ls="--", lw=1, label="value")
over.set(xlabel="step of the window", ylabel="value", xlim=(0, STEPS - 1), ylim=(-1.2, 1.45))
over.set_title("Values of states in a window of several episodes")
over.legend(frameon=False, ncols=2, loc="upper right")

colors = dict(zip(ways, ["#d55e00", "#0072b2", "#56b4e9"], strict=True))
last = {with_resets: 0.45, with_loop: 0.8}  # heights of their names
beside = {"ha": "right", "transform": axes["loss"].transAxes}
for name, (losses, seconds, _) in runs.items():
    axes["loss"].plot(seconds, losses, color=colors[name], lw=1.2)
    axes["loss"].text(0.98, last[name], name, color=colors[name], **beside)
axes["loss"].set(
    yscale="log",
    xlim=(0, spent),
    xlabel="seconds of training",
    ylabel="squared error,\nrelative to that of 0",
    title="Losses while both learn",
)

names = [name.replace(", ", ",\n") for name in ways]
bars = axes["time"].barh(names, list(milliseconds.values()), color=list(colors.values()))
axes["time"].bar_label(bars, [f"{each:.3g} ms" for each in milliseconds.values()], padding=3)
axes["time"].invert_yaxis()
axes["time"].margins(x=0.3)
axes["time"].set(xlabel="forward and backward, ms", title=f"A window of {BATCH} × {STEPS} steps")
axes["time"].tick_params(axis="y", length=0)
for each in axes.values():
    each.spines[["top", "right"]].set_visible(False)
plt.show()
