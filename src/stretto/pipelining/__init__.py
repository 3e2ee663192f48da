"""Layer-wise staleness."""

from stretto.pipelining.failure import BlockFailed
from stretto.pipelining.repairs import Repairs
from stretto.pipelining.rng import batch_rng
from stretto.pipelining.schedule import ScheduleDSP
from stretto.pipelining.simulate import Simulation, simulate
from stretto.pipelining.spec import Staleness

__all__ = ["BlockFailed", "Repairs", "ScheduleDSP", "Simulation", "Staleness", "batch_rng", "simulate"]
