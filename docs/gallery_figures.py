"""What is said below the figures of the gallery, and which panel of each is on its card."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx

IMAGES = Path(__file__).parent / "auto_gallery" / "images"
# Pixels of a card.
CARD = 640, 400

Box = tuple[float, float, float, float]
WHOLE = 0.0, 0.0, 1.0, 1.0


class Seen(NamedTuple):
    """A figure: its caption, and its panel for the card, as left, top, right and bottom."""

    caption: str
    panel: Box = WHOLE


FIGURES = {
    "train_gru_001": Seen(
        "Loss over seconds of training, and over batches: both networks learn the same, at "
        "different speeds.",
        (0, 0, 0.505, 1),
    ),
    "own_cell_001": Seen(
        "Above: inputs, and what the trained cell remembers. Below: the loss, and the time of a "
        "step beside two loops.",
        (0.43, 0.56, 1, 1),
    ),
    "spiking_001": Seen("One neuron: it sums up its input, and sends a spike at the threshold."),
    "spiking_002": Seen("The patterns to be told apart: each point is a spike of a channel."),
    "spiking_003": Seen(
        "Spikes of hidden neurons in one sequence, the count of each output, and the loss.",
        (0, 0, 0.315, 1),
    ),
    "episodes_001": Seen(
        "Above: values of states in a window of several episodes, learned and true. Below: the "
        "loss over time, and the time of a step.",
        (0, 0.53, 0.43, 1),
    ),
    "long_series_001": Seen(
        "Memory at most, by what is kept; and which cues are learned when gradients are truncated.",
        (0.57, 0, 1, 1),
    ),
    "ensemble_001": Seen(
        "Forecasts of an ensemble where there were data, and where there were none: there its "
        "members disagree."
    ),
    "selective_001": Seen(
        "Above: wrong answers of a selective model and of one with equal steps. Below: the size of "
        "steps is large where a symbol is marked."
    ),
    "pruned_rnn_001": Seen(
        "Accuracy before and after pruning, the weights that are kept, and the time of a step by "
        "their share.",
        (0.67, 0, 1, 1),
    ),
    "pruned_cnn_001": Seen("The time of a step over the share of weights that is kept."),
    "advection_diffusion_001": Seen(
        "The source and its sensors; the source as it is found by explicit and by implicit steps.",
        (0.31, 0, 0.6, 1),
    ),
    "fit_diffusion_001": Seen(
        "Two of the maps, how fast the ground is, and how fast it is found to be.",
        (0.51, 0, 1, 1),
    ),
    "cable_001": Seen(
        "Above: the voltage that was seen, first guessed and learned. Below: pulses along the "
        "axon, and conductances on their way to the true ones.",
        (0, 0.51, 0.52, 1),
    ),
    "smoother_001": Seen(
        "A photograph as observed, interpolated, filtered and smoothed.", (0.5, 0.5, 1, 1)
    ),
    "filter_001": Seen(
        "A sound, and below it the angle and the distance of the pole: true and learned."
    ),
    "mpi_001": Seen("The peak memory of each rank, and how much of it are its Jacobians."),
    "flop_of_steps_001": Seen(
        "The FLOP of each step of three schedules, over what it would take if nothing were sparse.",
        (0.68, 0, 1, 1),
    ),
    "strategies_001": Seen(
        "The time of a step over the number of workers, by strategy; and what it consists of.",
        (0, 0, 0.47, 1),
    ),
}


def show_captions(app: Sphinx, page: nodes.document) -> None:
    """Put captions under the figures of a page of the gallery, which roll on narrow screens."""
    if not app.env.docname.startswith("auto_gallery/plot_"):
        return
    for image in [each for each in page.findall() if each.tagname == "imgsgnode"]:
        seen = FIGURES[Path(image["uri"]).stem.removeprefix("sphx_glr_plot_")]
        if image["alt"].startswith("plot "):
            image["alt"] = seen.caption
        figure = nodes.figure()
        page.set_id(figure)
        image.replace_self(figure)
        rolls = ["rolls"] if seen.panel != WHOLE else []
        figure += [nodes.container("", image, classes=rolls), nodes.caption("", seen.caption)]


def draw_cards(app: Sphinx) -> None:
    """Draw cards that show one panel, in place of whole figures in small."""
    first = dict.fromkeys(name.rpartition("_")[0] for name in FIGURES)
    for name in first:
        number = max(each for each in FIGURES if each.startswith(f"{name}_"))
        left, top, right, bottom = FIGURES[number].panel
        large, small = (IMAGES / f"sphx_glr_plot_{number}{end}.png" for end in ("_2_00x", ""))
        with Image.open(large if large.exists() else small) as whole:
            wide, high = whole.size
            box = int(left * wide), int(top * high), int(right * wide), int(bottom * high)
            panel = whole.convert("RGB").crop(box)
        panel.thumbnail(CARD, Image.Resampling.LANCZOS)
        card = Image.new("RGB", CARD, "white")
        card.paste(panel, tuple((a - b) // 2 for a, b in zip(CARD, panel.size, strict=True)))
        card.save(IMAGES / "thumb" / f"sphx_glr_plot_{name}_thumb.png", optimize=True)
