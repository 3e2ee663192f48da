"""How old the parameters are that each block of a split model trains on: (p; m).

A model is cut into K consecutive blocks, block k on worker k. Layer-wise staleness (DSP, arXiv 1909.02625):

    m_k   at the moment block k runs forward on batch n it runs backward on batch n - m_k;  m_{K-1} = 0
    p_k   outputs of block k on their way to k+1;                                           p_{K-1} = 0
    q_k   gradients on their way from k+1 to k;         m_k = m_{k+1} + p_k + q_k

What is computed depends on m alone. p and q say how m_k - m_{k+1} divides into outputs and gradients under way,
for the drawing, the memory and the predicted throughput.
"""

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

BackwardParams = Literal["current", "stashed"]
PerBlock = int | Sequence[int]

_PATTERN = re.compile(r"DSP\(\s*([\d,\s]+);\s*([\d,\s]+?)\s*(?:;\s*(stashed)\s*)?\)")


@dataclass(frozen=True, slots=True)
class Staleness:
    """The staleness of K blocks, first to last.

    Raises ValueError, with the values, for a combination that no pipeline has: another number of p than of m,
    m_{K-1} or p_{K-1} other than 0, or m_k - m_{k+1} - p_k < 0.
    """

    p: tuple[int, ...]
    """Outputs on their way from each block to the next."""
    m: tuple[int, ...]
    """Updates of each block between a batch's forward and its backward."""
    backward_params: BackwardParams = "current"
    """The weights that a backward uses: those of its moment, or those of the batch's forward, kept ("stashed")."""

    def __post_init__(self) -> None:
        p, m = _whole_numbers(self.p, "p"), _whole_numbers(self.m, "m")
        object.__setattr__(self, "p", p)
        object.__setattr__(self, "m", m)
        if not m or len(p) != len(m):
            raise ValueError(f"p={p} and m={m}: expected one value of each for every block, and one block or more")
        if min(*p, *m, 0) < 0:
            raise ValueError(f"p={p} and m={m}: expected whole numbers from 0")
        if m[-1] != 0 or p[-1] != 0:
            raise ValueError(
                f"m_{self.K - 1}={m[-1]} and p_{self.K - 1}={p[-1]}: the last block has nothing behind it, "
                "its m and its p are 0"
            )
        for k, q in enumerate(self.q[:-1]):
            if q < 0:
                raise ValueError(
                    f"m_{k}={m[k]}, m_{k + 1}={m[k + 1]} and p_{k}={p[k]}: m_{k} - m_{k + 1} = {m[k] - m[k + 1]} "
                    f"batches are under way between the blocks {k} and {k + 1}, so p_{k} is at most that, "
                    f"and m never rises from block to block"
                )
        if self.backward_params not in ("current", "stashed"):
            raise ValueError(f'backward_params={self.backward_params!r}: expected "current" or "stashed"')

    @property
    def K(self) -> int:  # noqa: N802  (the paper's symbol)
        """The number of blocks."""
        return len(self.m)

    @property
    def q(self) -> tuple[int, ...]:
        """Gradients on their way to each block from the next: q_k = m_k - m_{k+1} - p_k."""
        return tuple(m - after - p for p, m, after in zip(self.p, self.m, (*self.m[1:], 0), strict=True))

    @classmethod
    def of(
        cls,
        num_blocks: int,
        p: PerBlock | None = None,
        m: "PerBlock | Staleness | str | None" = None,
        backward_params: BackwardParams | None = None,
    ) -> "Staleness":
        """The staleness that a schedule's arguments mean.

        - Nothing given: p = 0, q = 1, so m_k = K-1-k: enough to keep all blocks busy where a hop costs little.
        - `p` a number: (p, ..., p, 0). `p` without `m`: q = 1.
        - `m` without `p`: p_k = min(1, m_k - m_{k+1}). `m` a `Staleness`, or its text: as it stands.
        - `backward_params`: that of `m` if it is a `Staleness`, else "current".

        Raises ValueError for another number of blocks than `num_blocks`, and as `Staleness` does.
        """
        if isinstance(m, str):
            m = cls.parse(m)
        if isinstance(m, Staleness):
            if p is not None and _per_block(p, num_blocks, "p") != m.p:
                raise ValueError(f"p={p} beside m={m}, which has its own p={m.p}: give one of them")
            if num_blocks != m.K:
                raise ValueError(f"m={m} is for {m.K} blocks, the model has {num_blocks}")
            return cls(m.p, m.m, backward_params or m.backward_params)
        if m is not None:
            ages = _per_block(m, num_blocks, "m")
            if p is None:
                steps = zip(ages, (*ages[1:], 0), strict=True)
                outputs = tuple(max(0, min(1, age - after)) for age, after in steps)
                outputs = (*outputs[:-1], 0)
            else:
                outputs = _per_block(p, num_blocks, "p")
            return cls(outputs, ages, backward_params or "current")
        return cls.dsp(num_blocks, 0 if p is None else p, 1, backward_params or "current")

    @classmethod
    def backprop(cls, num_blocks: int) -> "Staleness":
        """Backpropagation: m = 0, every block waits for the others."""
        return cls((0,) * num_blocks, (0,) * num_blocks)

    @classmethod
    def features_replay(cls, num_blocks: int) -> "Staleness":
        """Features Replay (arXiv 1807.04511): m_k = K-1-k, the input replayed at the weights of the backward."""
        return cls.dsp(num_blocks, 0, 1)

    @classmethod
    def delayed_gradients(cls, num_blocks: int) -> "Staleness":
        """Decoupled backpropagation (DDG, arXiv 1804.10574), PipeDream's 1F1B with weight stashing.

        m_k = K-1-k, the backward at the kept weights and graph of the forward.
        """
        return cls.dsp(num_blocks, 0, 1, "stashed")

    @classmethod
    def dsp(
        cls, num_blocks: int, p: PerBlock = 1, q: PerBlock = 1, backward_params: BackwardParams = "current"
    ) -> "Staleness":
        """DSP with queues of p_k outputs and q_k gradients: m_k = m_{k+1} + p_k + q_k.

        A number stands for all blocks but the last, which has 0. `dsp(3)` is the paper's DSP(1,1,0; 4,2,0).
        """
        check_count(num_blocks, "blocks")
        outputs, gradients = _per_block(p, num_blocks, "p"), _per_block(q, num_blocks, "q")
        if gradients[-1] != 0:
            raise ValueError(f"q={gradients}: no gradient comes to the last block from another, its q is 0")
        ages = [0] * num_blocks
        for k in reversed(range(num_blocks - 1)):
            ages[k] = ages[k + 1] + outputs[k] + gradients[k]
        return cls(outputs, tuple(ages), backward_params)

    @classmethod
    def parse(cls, text: str) -> "Staleness":
        """Read "DSP(1,1,0; 4,2,0)", as `str` prints it: p, then m, then "; stashed" where it is.

        Raises ValueError for another form.
        """
        if not isinstance(text, str):
            raise TypeError(f'{text!r}: expected a text such as "DSP(1,1,0; 4,2,0)"')
        found = _PATTERN.fullmatch(text.strip())
        if not found:
            raise ValueError(f'{text!r}: expected p and m of every block, such as "DSP(1,1,0; 4,2,0)"')
        try:
            p, m = (tuple(int(value) for value in part.split(",")) for part in found.groups()[:2])
        except ValueError:
            raise ValueError(f'{text!r}: expected numbers with commas, such as "DSP(1,1,0; 4,2,0)"') from None
        return cls(p, m, "stashed" if found[3] else "current")

    def __str__(self) -> str:
        p, m = (",".join(map(str, values)) for values in (self.p, self.m))
        return f"DSP({p}; {m}{'; stashed' * (self.backward_params == 'stashed')})"


def check_count(value: Any, of: str) -> None:
    """Raise TypeError or ValueError for a number `of` blocks or stages that is no whole number from 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} {of}: expected a whole number")
    if value < 1:
        raise ValueError(f"{value} {of}: expected 1 or more")


def _whole_numbers(values: Any, name: str) -> tuple[int, ...]:
    """Values for all blocks, NumPy's numbers among them."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}={values!r}: expected a whole number for each block, first to last")
    values = tuple(values)
    if not all(hasattr(value, "__index__") and not isinstance(value, bool) for value in values):
        raise ValueError(f"{name}={values}: expected whole numbers, one for each block")
    return tuple(map(operator.index, values))


def _per_block(value: PerBlock, num_blocks: int, name: str) -> tuple[int, ...]:
    """A value for every block: a number is that of all blocks but the last."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,) * (num_blocks - 1) + (0,)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={value!r}: expected a whole number, or one for each of {num_blocks} blocks")
    if len(value) != num_blocks:
        raise ValueError(f"{name}={tuple(value)} has {len(value)} values, the model has {num_blocks} blocks")
    return tuple(value)
