"""Audio for the GRU, as mel-frequency cepstral coefficients: Section 4.2 and Table 3 of the paper.

IRMAS (Bosch et al., 2012) from a local folder: 3-second stereo recordings of 11 instruments. Where
it is not at hand, recorded notes of nine instruments, which the sound font in `pretty_midi` has,
stand in: a clip is a random sequence of the notes of one instrument, on the left and on the right.
"""

from __future__ import annotations

import importlib.util
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .peers import MissingPeerError

Array = NDArray[Any]

RATE = 44_100
LENGTH = 3 * RATE

_INSTALL = "pip install 'sparsescan[bench]'"


class Setting(NamedTuple):
    """How coefficients are made: how many, FFT window and hop in samples."""

    coefficients: int
    window: int
    hop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Frames and coefficients of a clip, of both channels and without the first one."""
        return 1 + LENGTH // self.hop, 2 * (self.coefficients - 1)


SETS = {"S": Setting(20, 4096, 512), "M": Setting(13, 2048, 256), "L": Setting(7, 1024, 128)}

# The samples of the sound font whose names begin so; shorter ones are loops of a wave or two.
_INSTRUMENTS = {
    "choir": "Choir|Aahs",
    "flute": "Flute",
    "horn": "FRHORN|.*FrenchHorn",
    "oboe": "Oboe",
    "organ": "B3LoDist|Church Org",
    "piano": "Piano ",
    "saxophone": "Alto|Bari|Sop",
    "strings": "ensstrings|Str1C",
    "trumpet": "Trump",
}
_SHORTEST = 0.25  # seconds of a note
_FADE = 220  # samples


@dataclass(frozen=True)
class Recordings:
    """Clips of several classes."""

    name: str  # what they are, for people
    classes: tuple[str, ...]
    labels: NDArray[np.int64]  # of each clip
    read: Callable[[int], Array]  # the samples of a clip, (2, LENGTH), float32


def load(folder: Path | None, per_class: int | None = None) -> Recordings:
    """IRMAS from a folder, or what stands in for it; of each class the first `per_class`."""
    return load_notes(per_class or 40) if folder is None else load_irmas(folder, per_class)


def features(recordings: Recordings, setting: Setting) -> Array:
    """Coefficients of all clips, shape ``(clips, frames, coefficients)``, float32."""
    return np.stack([mfcc(recordings.read(k), setting) for k in range(len(recordings.labels))])


def mfcc(clip: Array, setting: Setting) -> Array:
    """Return the coefficients of a clip, each with zero mean and unit variance over the frames.

    The first one, which is the power, is left out; those of the channels stand side by side.
    """
    try:
        import librosa
    except ImportError as error:
        raise MissingPeerError(f"{error}: {_INSTALL}") from None
    count, window, hop = setting
    coefficients = librosa.feature.mfcc(y=clip, sr=RATE, n_mfcc=count, n_fft=window, hop_length=hop)
    coefficients = coefficients[:, 1:].reshape(-1, coefficients.shape[-1]).T.astype(np.float64)
    coefficients -= coefficients.mean(axis=0)
    deviation = coefficients.std(axis=0)
    # A coefficient that never changes, as of silence, stays zero but for rounding.
    return (coefficients / np.where(deviation > 1e-6, deviation, 1)).astype(np.float32)


# -- IRMAS ----------------------------------------------------------------------------------------


def load_irmas(folder: Path, per_class: int | None = None) -> Recordings:
    """Return the training set: a folder of WAV files for each instrument."""
    files = {
        each.name: sorted(each.glob("*.wav"))[:per_class]
        for each in sorted(folder.iterdir())
        if each.is_dir()
    }
    files = {name: recordings for name, recordings in files.items() if recordings}
    if not files:
        raise FileNotFoundError(
            f"{folder} has no folders with .wav files; expected one for each instrument, as in "
            "IRMAS-TrainingData"
        )
    paths = [path for recordings in files.values() for path in recordings]
    labels = np.repeat(np.arange(len(files)), [len(recordings) for recordings in files.values()])
    name = f"recordings in {folder.resolve().name}"
    return Recordings(name, tuple(files), labels, lambda k: _read(paths[k]))


def _read(path: Path) -> Array:
    try:
        import soundfile
    except ImportError as error:
        raise MissingPeerError(f"{error}: {_INSTALL}") from None
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    both = _resample(samples.T[:2], rate)
    clip = np.zeros((2, LENGTH), np.float32)
    clip[:, : both.shape[1]] = both[:, :LENGTH]  # mono goes to both
    return clip


def _resample(samples: Array, rate: int) -> Array:
    from scipy.signal import resample_poly

    common = gcd(RATE, rate)
    resampled: Array = resample_poly(samples, RATE // common, rate // common, axis=-1)
    return resampled


# -- Recorded notes -------------------------------------------------------------------------------


def load_notes(per_class: int) -> Recordings:
    """Random sequences of recorded notes, of nine instruments."""
    spec = importlib.util.find_spec("pretty_midi")
    if spec is None or spec.origin is None:
        raise MissingPeerError(
            f"no recordings: {_INSTALL} for those of pretty_midi, or give a folder by --data"
        )
    path = Path(spec.origin).parent / "TimGM6mb.sf2"
    notes = list(instruments(path.read_bytes()).values())
    labels = np.repeat(np.arange(len(notes)), per_class)

    def read(k: int) -> Array:
        rng = np.random.default_rng(k)
        return np.stack([_sequence(rng, notes[labels[k]]) for _ in range(2)])

    name = "recorded notes of the sound font TimGM6mb in pretty_midi, in random sequences"
    return Recordings(name, tuple(_INSTRUMENTS), labels, read)


def instruments(font: bytes) -> dict[str, list[Array]]:
    """Return the notes of each instrument of a sound font, at our sample rate.

    The format is SoundFont 2.01: of ``sdta`` the chunk ``smpl`` with all samples, and of ``pdta``
    the chunk ``shdr`` with a record of 46 bytes for each note.
    """
    lists = {font[start : start + 4]: (start + 4, stop) for _, start, stop in _chunks(font, 12)}
    (samples,) = (font[a:b] for name, a, b in _chunks(font, *lists[b"sdta"]) if name == b"smpl")
    (headers,) = (font[a:b] for name, a, b in _chunks(font, *lists[b"pdta"]) if name == b"shdr")
    wave = np.frombuffer(samples, "<i2").astype(np.float32) / 2**15
    notes: dict[str, list[Array]] = {instrument: [] for instrument in _INSTRUMENTS}
    for name, start, stop, _, _, rate in struct.iter_unpack("<20s5I6x", headers):
        title = name.split(b"\0")[0].decode("latin-1")
        for instrument, pattern in _INSTRUMENTS.items():
            if re.match(pattern, title) and stop - start > _SHORTEST * rate:
                notes[instrument].append(_resample(wave[start:stop], rate))
    return notes


def _chunks(data: bytes, start: int, stop: int | None = None) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, beginning and end of every chunk of a RIFF file."""
    while start < (stop or len(data)):
        name, size = struct.unpack_from("<4sI", data, start)
        yield name, start + 8, start + 8 + size
        start += 8 + size + size % 2


def _sequence(rng: np.random.Generator, notes: list[Array]) -> Array:
    """Return notes one after the other, each faded in and out."""
    ramp = np.linspace(0, 1, _FADE, dtype=np.float32)
    wave, filled = np.empty(LENGTH, np.float32), 0
    while filled < LENGTH:
        note = notes[rng.integers(len(notes))].copy()
        note[:_FADE] *= ramp
        note[-_FADE:] *= ramp[::-1]
        part = note[: LENGTH - filled]
        wave[filled : filled + len(part)] = part
        filled += len(part)
    return wave
