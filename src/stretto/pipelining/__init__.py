"""Layer-wise staleness."""

from stretto.pipelining.repairs import Repairs
from stretto.pipelining.rng import batch_rng
from stretto.pipelining.simulate import Simulation, simulate
from stretto.pipelining.spec import Staleness

__all__ = ["Repairs", "Simulation", "Staleness", "batch_rng", "simulate"]
