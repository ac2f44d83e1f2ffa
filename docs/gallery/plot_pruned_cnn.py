"""
Train a pruned convolutional network
====================================

PyTorch multiplies by pruned weights as by any others. :func:`sparsescan.jacobians.from_torch` takes
a stack of layers with the masks that ``torch.nn.utils.prune`` has left, and its training step uses
only the weights that are kept: in the forward pass, and in the gradients of activations and
parameters. In a model, :func:`sparsescan.torch.convert` does so in one line.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.utils import prune

from sparsescan.jacobians import Sequential, from_torch
from sparsescan.torch import convert

torch.set_num_threads(1)
torch.manual_seed(0)

# %%
# The network
# -----------
# A VGG-11 with half the channels, for images of 32 by 32 pixels, without its last layers. Pruning
# keeps the largest weights of each convolution.


def vgg(density):
    """Return the network with this part of its weights."""
    layers, channels = [], 3
    for width in (32, "pool", 64, "pool", 128, 128, "pool", 256, 256, "pool", 256, 256):
        if width == "pool":
            layers.append(torch.nn.MaxPool2d(2))
            continue
        conv = torch.nn.Conv2d(channels, width, 3, padding=1)
        if density < 1:
            prune.l1_unstructured(conv, "weight", amount=1 - density)
        layers += [conv, torch.nn.ReLU()]
        channels = width
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(1024, 10))


images = torch.randn(8, 3, 32, 32)
labels = torch.randint(10, (8,))

# %%
# Gradients
# ---------
# The training step takes arrays, and returns the gradients in all parameters by their names. They
# are those of PyTorch.

density = 0.03
model = vgg(density)
step = Sequential(from_torch(model, (3, 32, 32))).training_step()
logits = step.forward(images.numpy())
probabilities = torch.softmax(torch.from_numpy(logits), 1)
errors = (probabilities - torch.nn.functional.one_hot(labels, 10)) / len(labels)
grads = step.backward(errors.numpy(), needs_input_grad=False).params

loss = torch.nn.functional.cross_entropy(model(images), labels)
loss.backward()
for name, param in model.named_parameters():
    expected = param.grad.numpy()
    ours = grads[name.removesuffix("_orig")]
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())

# %%
# Time by density
# ---------------
# If at most a quarter of the weights are kept, ``convert`` runs the same step in the model's
# ``forward`` and ``backward``. It leaves a denser model alone. Both models take turns, with one
# thread each, and the fastest call of each counts.

print(convert(model))

densities = [0.01, 0.02, 0.05, 0.1, 0.2]
models = {}
for density in densities:
    models["PyTorch", density] = vgg(density)
    models["sparsescan", density] = vgg(density)
    convert(models["sparsescan", density])
times = {key: [] for key in models}
for _ in range(4):
    for key, each in models.items():
        start = time.perf_counter()
        torch.nn.functional.cross_entropy(each(images), labels).backward()
        times[key].append(time.perf_counter() - start)

fig, axes = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
for name, marker, color in (("PyTorch", "o-", "#0072b2"), ("sparsescan", "s-", "#d55e00")):
    fastest = [1e3 * min(times[name, density]) for density in densities]
    axes.plot(densities, fastest, marker, color=color, label=name)
axes.set(
    xscale="log",
    ylim=(0, None),
    xlabel="weights that are kept",
    ylabel="forward and backward of 8 images, ms",
    title="A pruned VGG-11 with half the channels",
)
axes.set_xticks(densities, [f"{density:.0%}" for density in densities])
axes.minorticks_off()
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()
