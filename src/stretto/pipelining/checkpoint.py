"""Saving, loading and merging: what `Simulation` and `ScheduleDSP` share.

Both write the same checkpoints, so a run that was simulated continues in processes and the other way round, bit for
bit, in the middle of what is under way.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from stretto.pipelining import checkpoint_folder as folders
from stretto.pipelining.block import Block, Gradients
from stretto.pipelining.block_state import (
    VERSION,
    State,
    capture,
    check,
    check_weights,
    load_weights,
    restore,
    settings_of,
    weights_of,
)
from stretto.pipelining.meeting import Meeting, together
from stretto.state import check_settings, to_plain
from stretto.tree import clone


class Checkpointed(ABC):
    """The state of blocks that train.

    All of it is asked for at the end of a step, and in processes by all of them at the end of the same step.
    Batches under way belong to it. Where the loader stands does not: save that yourself (`stretto.echo(loader)` and
    torchdata's StatefulDataLoader have a `state_dict`), and continue with the batch after the last one that was
    trained on.
    """

    num_batches: int
    _meeting: Meeting
    """The processes whose blocks make up the model."""

    def state_dict(self) -> State:
        """All that training goes on from, in containers, numbers and tensors, as a copy.

        Of all blocks in a simulation, of this process's block alone in `ScheduleDSP`. Loads with
        `torch.load(weights_only=True)`. Waits for gradients that are on their way.

        Raises TypeError for a batch under way that is more than dicts, lists and tuples of tensors and numbers.
        """
        with self._telling():
            copied: State = clone({"version": VERSION, "blocks": self._capture()})
            return copied

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`: that of this block, or of all blocks, from a simulation or from processes.

        Collective. Drops what is under way. Raises ValueError, in all processes and before anything is changed, if
        one of them got a state of other settings (K, m, p, backward_params, accumulate, repairs, seed, block,
        replicas, kind of optimizer), with both values, or blocks of different steps.
        """
        with self._telling():
            # to_plain: it may have been loaded onto an accelerator
            self._load(lambda block: clone(to_plain(self._find(state, block))))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint, which `folder` holds from then on, and not before all processes have finished.

        Collective. The folder is on a file system that all processes see; its parents are made, and an older
        checkpoint in it is replaced. Weights and optimizer state stand there in the format of
        torch.distributed.checkpoint, as "model.NAME" and "optimizer.state.NAME.KEY" with the plain model's names.

        Raises the same error in all processes if one of them has one; training can go on then, the older checkpoint
        is still there, and nothing else is. Raises FileExistsError for a folder with other things in it.
        """
        with self._telling():
            folders.write(Path(folder).resolve(), self.num_batches, self._capture, self._meeting)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint that `save` wrote, in a simulation or in processes; as `load_state_dict`.

        Raises FileNotFoundError where there is none, ValueError for one that is not whole.
        """
        with self._telling():
            self._load(
                lambda block: folders.read(
                    Path(folder).resolve(), block.index, self._replica[0], lambda state: self._accept(block, state)
                )
            )

    def merged_weights(self) -> dict[str, Any]:
        """The plain model's `state_dict`, as a copy on the CPU, in every process.

        Under the plain model's own names where `partition` or torch's `pipeline()` cut it, else under those of
        nn.Sequential(*blocks). Weights are those of the moment: after `flush()` all blocks have trained on every
        batch. Of replicas the first one's buffers count. Collective.
        """
        with self._telling():
            merged: dict[str, Any] = {}
            for weights in together(self._meeting, self._own_weights):
                merged |= weights
            return merged

    def load_weights(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the plain model's `state_dict` into the blocks; the optimizers and all else stay as they are.

        Collective; every process gives the whole dict. Raises ValueError in all of them, before anything is
        changed, for keys that are missing or that no block has, with their names, for other shapes, and while
        batches are under way.
        """
        with self._telling():
            own = [weights_of(block) for block in self._own_blocks]
            told = together(self._meeting, lambda: [name for weights in own for name in weights])
            names = {name for each in told for name in each}

            def check_all() -> None:
                if any(block.flights or block.group_is_open for block in self._own_blocks):
                    raise ValueError(
                        f"batches are under way after batch {self.num_batches}: call flush() before load_weights()"
                    )
                missing, unexpected = names - state_dict.keys(), state_dict.keys() - names
                if missing or unexpected:
                    raise ValueError(
                        f"the weights do not fit: missing {sorted(missing)}, unexpected {sorted(unexpected)}"
                    )
                for block, weights in zip(self._own_blocks, own, strict=True):
                    check_weights(weights, {name: state_dict[name] for name in weights}, block)

            together(self._meeting, check_all)
            for block, weights in zip(self._own_blocks, own, strict=True):
                load_weights(block, {name: state_dict[name] for name in weights})

    # What differs between one process and many

    @property
    @abstractmethod
    def _own_blocks(self) -> Sequence[Block]:
        """The blocks of this process."""

    @property
    def _replica(self) -> tuple[int, int]:
        """Which replica this process trains, and of how many."""
        return 0, 1

    @abstractmethod
    def _telling(self) -> AbstractContextManager[None]:
        """What is raised inside is told to all processes."""

    @abstractmethod
    def _show_arrived(self, block: Block) -> list[Gradients]:
        """The gradients for `block` that no backward has used yet, oldest first; they stay unused."""

    @abstractmethod
    def _replace_arrived(self, block: Block, gradients: list[Gradients] | None) -> None:
        """Put `gradients` in the place of those; with None drop them."""

    def _resume(self, *, is_under_way: bool) -> None:  # noqa: B027  (a simulation has nothing to do)
        """A state was loaded; in some process something `is_under_way`."""

    # How it is done

    def _capture(self) -> list[State]:
        return [
            capture(block, self._show_arrived(block), self.num_batches, self._replica) for block in self._own_blocks
        ]

    def _find(self, state: Mapping[str, Any], block: Block) -> State:
        """That part of a state that is the block's."""
        if not isinstance(state, Mapping):
            raise TypeError(f"the state is a {type(state).__name__}: expected what state_dict() gave")
        states = state.get("blocks") or [state]
        mine = next((each for each in states if each.get("settings", {}).get("block") == block.index), states[0])
        self._accept(block, mine)
        return dict(mine)

    def _accept(self, block: Block, state: Mapping[str, Any]) -> None:
        if state.get("version") != VERSION or "settings" not in state:
            raise ValueError(
                f"the state is of version {state.get('version')!r}, expected {VERSION}: it was not saved by "
                "stretto.pipelining, or by another version of it"
            )
        check_settings(state["settings"], settings_of(block, self._replica), "pipeline")

    def _load(self, read: Callable[[Block], State]) -> None:
        folders.check_same_step(together(self._meeting, lambda: self.num_batches), self._meeting)
        states: list[State] = []

        def prepare() -> list[tuple[int, bool]]:
            for block in self._own_blocks:
                state = read(block)
                check(block, state)
                states.append(state)
            return [(state["num_batches"], bool(state["flights"]) or state["group_is_open"]) for state in states]

        heard = [each for told in together(self._meeting, prepare) for each in told]
        folders.check_same_step([count for count, _ in heard], self._meeting)
        for block, state in zip(self._own_blocks, states, strict=True):
            self._replace_arrived(block, None)
            self._replace_arrived(block, restore(block, state))
        self.num_batches = heard[0][0]
        self._resume(is_under_way=any(is_under_way for _, is_under_way in heard))

    def _own_weights(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if self._replica[0] == 0:
            for block in self._own_blocks:
                own |= clone(to_plain(weights_of(block), "the weights"))
        return own
