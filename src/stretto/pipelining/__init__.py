"""Layer-wise staleness: the blocks of a split model train without waiting for each other (DSP, arXiv 1909.02625).

    spec         Staleness: (p; m), how old the parameters of each block may be
    partition    cuts a model: layers, measure     names: the plain model's keys, in every block

    block        one block: forward, recompute, backward, update     passes, rng, options, repairs
      |
      |-- simulate    K blocks in one process
      `-- schedule    a block in each of K processes     place, transport, codec, replicas, failure

                          feed ─> batch n ──────> DATA ─> block 1 ─> DATA ─> block 2 ─> loss
                                  block 0 <── GRADIENT <─         <── GRADIENT <─  of batch n - m_k
                          flush   END ──>   the last m_k backwards   <── DONE, DONE ──>

    checkpoint   what is under way, saved and continued, in either
    events, memory, drawing      predictions of time and bytes, and the picture of the schedule
    peers        DGL and DNI, to compare with

Numbers depend on m alone, so `simulate` and K processes give the same bits.
"""

from stretto.pipelining.failure import BlockFailed
from stretto.pipelining.partition import partition
from stretto.pipelining.repairs import Repairs
from stretto.pipelining.rng import batch_rng
from stretto.pipelining.schedule import ScheduleDSP
from stretto.pipelining.simulate import Simulation, simulate
from stretto.pipelining.spec import Staleness

__all__ = [
    "BlockFailed",
    "Repairs",
    "ScheduleDSP",
    "Simulation",
    "Staleness",
    "batch_rng",
    "partition",
    "simulate",
]
