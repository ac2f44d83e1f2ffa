"""Recurrent cells of the literature, each as its paper defines it.

In the docstrings, ``h'`` is the new state and ``h`` the last one, ``∘`` multiplies elementwise, and
σ is the sigmoid. ``W`` is ``weight_ih`` and ``U`` is ``weight_hh``; the biases of their products
are not written. Cells that torchrecurrent has too have the names and shapes of its parameters.

Examples
--------
>>> from sparsescan.recurrent.catalogue import LEM, tauGRU
>>> LEM(3, 4, dt=0.5).state_size
8
>>> tauGRU(3, 4, delay=5, nonlinearity="relu").state_size
24
"""

from .additive import ATR, CFN, JANET, RAN
from .delayed import TGRU, TLSTM, TRNN, tauGRU
from .dynamical import LEM, AntisymmetricRNN, GatedAntisymmetricRNN, UnICORNN, coRNN
from .gated import MGU, SGRN, STAR, UGRNN, LightRU, LiGRU, MinimalRNN
from .independent import BR, NBR, SCRN, IndRNN
from .linear import minGRU, minLSTM
from .lstms import (
    MCLSTM,
    WMCLSTM,
    BlockDiagonalLSTM,
    MogrifierLSTM,
    MultiplicativeLSTM,
    OriginalLSTM,
    PeepholeLSTM,
    ProjectedLSTM,
    ResLSTM,
)
from .masked import (
    RecurrentDropoutGRU,
    RecurrentDropoutLSTM,
    VariationalGRU,
    VariationalLSTM,
    ZoneoutLSTM,
)
from .normalised import LayerNormGRU, LayerNormLSTM
from .scaled import FastGRNN, FastRNN, MiRU1, MiRU2
from .searched import MUT1, MUT2, MUT3, NAS
from .simple_gated import DSGU, SGU, IntersectionRNN
from .spiking import Alpha, Leaky, Synaptic
from .xlstm import sLSTM

__all__ = [
    "ATR",
    "BR",
    "CFN",
    "DSGU",
    "JANET",
    "LEM",
    "MCLSTM",
    "MGU",
    "MUT1",
    "MUT2",
    "MUT3",
    "NAS",
    "NBR",
    "RAN",
    "SCRN",
    "SGRN",
    "SGU",
    "STAR",
    "TGRU",
    "TLSTM",
    "TRNN",
    "UGRNN",
    "WMCLSTM",
    "Alpha",
    "AntisymmetricRNN",
    "BlockDiagonalLSTM",
    "FastGRNN",
    "FastRNN",
    "GatedAntisymmetricRNN",
    "IndRNN",
    "IntersectionRNN",
    "LayerNormGRU",
    "LayerNormLSTM",
    "Leaky",
    "LiGRU",
    "LightRU",
    "MiRU1",
    "MiRU2",
    "MinimalRNN",
    "MogrifierLSTM",
    "MultiplicativeLSTM",
    "OriginalLSTM",
    "PeepholeLSTM",
    "ProjectedLSTM",
    "RecurrentDropoutGRU",
    "RecurrentDropoutLSTM",
    "ResLSTM",
    "Synaptic",
    "UnICORNN",
    "VariationalGRU",
    "VariationalLSTM",
    "ZoneoutLSTM",
    "coRNN",
    "minGRU",
    "minLSTM",
    "sLSTM",
    "tauGRU",
]
