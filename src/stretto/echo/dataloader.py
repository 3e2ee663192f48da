"""EchoDataLoader: data echoing inside torch's worker processes.

    map-style   sampler -> EchoPlan (main process) -> torch's index queues -> EchoedDataset (workers) -> collate
    iterable    EchoedStream (workers) -> collate

torch's DataLoader does all the rest: plan and memory are an ordinary batch sampler and an ordinary data set, and a
trainer that rebuilds the loader from its parts has them too.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from inspect import Signature, signature
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe, Sampler

from stretto.echo.buffer import Bound
from stretto.echo.factor import Factor, check_factor, default_max_factor
from stretto.echo.order import samplers_of
from stretto.echo.settings import check_int
from stretto.echo.stats import Clock, EchoStats
from stretto.echo.workers.batch_plan import EchoPlan, PlanSettings
from stretto.echo.workers.board import Board
from stretto.echo.workers.memory import EchoedDataset, count_residents
from stretto.echo.workers.pace import Pace
from stretto.echo.workers.parts import Echoed, ErrorPolicy, OnError, Parts
from stretto.echo.workers.room import Room
from stretto.echo.workers.stream import EchoedStream
from stretto.echo.workers.stream_position import StreamPosition


class _ByKeyword(type):
    """Passes arguments on by name: Lightning notes them and replaces some by name when it rebuilds a loader."""

    @property
    def __signature__(cls) -> Signature:
        of_init = signature(cls.__init__)  # type: ignore[misc]
        return of_init.replace(parameters=list(of_init.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        parameters = cls.__signature__.parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        if len(args) > len(names):
            return super().__call__(*args, **kwargs)
        return super().__call__(**dict(zip(names, args, strict=False)), **kwargs)


class EchoDataLoader(DataLoader[Any], metaclass=_ByKeyword):
    """A DataLoader whose workers use each example `factor` times, with new augmentations each time.

    Data echoing before augmentation, after Choi, Passos, Shallue, Dahl, arXiv 1907.05550, section 3.1: an example
    is read and decoded once, kept by the worker that did it, and `augment` (or the stages after `echo_after`) run
    for each use. Batches are drawn at random from what is kept. For the arguments up to `in_order` see
    torch.utils.data.DataLoader.

    Map-style data sets: an epoch uses every example of the sampler's order exactly its number of times. The order
    of uses and the random state of each follow from the settings, so that batches are the same in every run, and
    an epoch's set of examples the same for any number of workers. Iterable data sets are echoed in each worker's
    stream.

    Args:
        factor: total uses of each example, a number >= 1, or "auto": R, measured at an interval.
        buffer: how many examples (batches, with a `batch_sampler` or `batch_size=None`) the workers keep together,
            or bytes such as "2GiB". Default 64 batches, at most 1 GiB.
        echo_after: the stage of a StagedDataset after which examples are kept; other data sets are taken apart by
            `StagedDataset.wrap`. None: after all of them.
        augment: called on the example at each use, after the stages if there are any.
        max_factor: the most uses under "auto". Default 8 for batches up to 4096 examples, 16 above.
        seed: of the order, the draws, fractional uses and the random states.
        on_error: "raise" what an example raises, or "skip" the example: leave it out, counted in `stats().skipped`.
        max_skipped: how many examples may be left out, in all workers and epochs together.

    Raises TypeError or ValueError for arguments that cannot work, naming the value.
    """

    dataset: Any  # an EchoedDataset or an EchoedStream

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        factor: Factor = 2.0,
        buffer: int | str | None = None,
        echo_after: str | None = None,
        augment: Callable[[Any], Any] | None = None,
        max_factor: int | None = None,
        seed: int = 0,
        on_error: OnError = "raise",
        max_skipped: int = 100,
    ) -> None:
        if not in_order:
            raise ValueError(
                "in_order=False: expected True. The uses of an example are planned for the worker that keeps it, "
                "and torch gives a batch to a fixed worker only in order"
            )
        if echo_after is not None and not isinstance(echo_after, str):
            raise TypeError(f"echo_after={echo_after!r}: expected the name of a stage")
        if augment is not None and not callable(augment):
            raise TypeError(f"augment={augment!r}: expected a function of an example that returns an example")
        factor = check_factor(factor)
        seed = check_int("seed", seed)
        if max_factor is not None:
            max_factor = check_int("max_factor", max_factor, at_least=1)
            if factor != "auto":
                raise ValueError(
                    f'max_factor={max_factor} has no effect with factor={factor}: it is the bound of "auto"'
                )
        policy = ErrorPolicy(on_error, check_int("max_skipped", max_skipped, at_least=0))
        bound = Bound.parse(buffer)
        if isinstance(dataset, Echoed):  # a trainer rebuilds this loader
            dataset = dataset.dataset
        num_examples = getattr(batch_sampler, "batch_size", None) or batch_size or 1
        most = max_factor or default_max_factor(num_examples)
        if isinstance(dataset, IterDataPipe | MapDataPipe):
            raise TypeError(
                f"dataset is a {type(dataset).__name__}: torch shards DataPipes among workers in a way of its own, "
                "which does not reach one inside another data set. Expected a Dataset or an IterableDataset"
            )
        if isinstance(dataset, IterableDataset) and echo_after is not None:
            raise ValueError(
                f"echo_after={echo_after!r}: an iterable data set has no stages. Give what is to run for each "
                "use as augment="
            )
        parts = Parts.of(dataset, echo_after, augment, seed, policy, Board(num_workers))
        echoed: EchoedDataset | EchoedStream
        if isinstance(dataset, IterableDataset):
            echoed = EchoedStream(dataset, parts, factor, most, batch_size or 1, bound, seed)
        else:
            echoed = EchoedDataset(dataset, parts)
            if factor != 1:  # no batch is made up with what was in the first ones
                echoed.total_dataset_length = 0
        super().__init__(
            echoed,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        self.shuffle = shuffle
        self.factor = factor
        self.buffer = buffer
        self.echo_after = echo_after
        self.augment = augment
        self.max_factor = max_factor
        self.seed = seed
        self.on_error = on_error
        self.max_skipped = max_skipped
        self._clock = Clock()
        self._num_iterations = 0
        self._bound = bound
        self._echo: EchoPlan | StreamPosition
        if isinstance(echoed, EchoedStream):
            self._echo = self._make_position(most)
        else:
            self._echo = self._make_plan(batch_sampler, most)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start an epoch, or continue the one that a loaded state was saved in."""
        self.dataset.set_epoch(self._echo.next_epoch)
        if not all(worker.is_alive() for worker in getattr(self._iterator, "_workers", ())):
            self._drop_workers(self._iterator)
        if isinstance(self._echo, EchoPlan):
            self._echo.prepare()  # before workers start: it may start some of its own, and fail
        return _Iteration(self, super().__iter__())

    def _drop_workers(self, batches: Any) -> None:
        """End workers of which some may be dead: torch uses persistent ones again, and would wait for them."""
        self._iterator = None
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()

    def set_epoch(self, epoch: int) -> None:
        """Number the first epoch `epoch`, at a run's start. Once epochs have begun they count on by themselves."""
        self._echo.set_epoch(epoch)

    def stats(self) -> EchoStats:
        """What has happened so far."""
        return self._echo.stats()

    def observe(self, per_example_losses: Any) -> None:
        """Tell the losses of the batch handed out last, as `EchoLoader.observe` does.

        A batch that is short of examples which raised (`on_error="skip"`) does not count: it is not known whose
        losses these are. Once one raised, nor do batches of one example or of a `batch_sampler`: another one may
        stand in for all of theirs. In a loader that a trainer rebuilt the same is
        `stretto.echo_plan(loader).observe(...)`.

        Raises ValueError over an iterable data set, too, and where Accelerate dispatches batches
        (`dispatch_batches=True`).
        """
        self._echo.observe(per_example_losses)

    def state_dict(self) -> dict[str, Any]:
        """Where the training step is: settings and positions, without any data."""
        return self._echo.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved: the next `iter()` yields the rest of that epoch.

        What workers had in memory is read again, once each. Raises ValueError if a setting differs, with both
        values: the numbers of workers and of processes too, since they decide the order; and if the order of the
        sampler cannot be made again.
        """
        self._echo.load_state_dict(state)

    def _make_plan(self, given: Any, max_factor: int) -> EchoPlan:
        """Put an EchoPlan in the place of the batch sampler (of the sampler with `batch_size=None`)."""
        is_single = self.batch_sampler is None
        if isinstance(given, EchoPlan):
            plan = given
            batch_size = None if plan.is_whole else plan.batch_size
            self.__dict__.update(sampler=plan.sampler, batch_size=batch_size, drop_last=plan.drop_last)
        elif given is not None:
            plan = EchoPlan(given, is_whole=True)
        else:
            plan = EchoPlan(self.sampler, self.batch_size or 1, self.drop_last)
        room = Room(
            dataset=self.dataset.dataset,
            parts=self.dataset.parts,
            bound=self._bound,
            is_whole=plan.is_whole,
            factor=math.inf if self.factor == "auto" else self.factor,
            num_workers=self.num_workers,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
        )
        plan.configure(
            PlanSettings(
                factor=self.factor,
                max_factor=max_factor,
                buffer=self.buffer,
                seed=self.seed,
                num_workers=self.num_workers,
                count_residents=room.count_residents,
                pace=Pace(self.dataset.board, self.num_workers, max_factor, self._clock),
                board=self.dataset.board,
                clock=self._clock,
                is_single=is_single,
            )
        )
        self._check_room(plan.draw_size)
        # Past torch's guard against changes: nothing has been drawn yet.
        self.__dict__["sampler" if is_single else "batch_sampler"] = plan
        return plan

    def _make_position(self, max_factor: int) -> StreamPosition:
        self._check_room(self.batch_size or 1)
        board = self.dataset.board
        settings = {
            "factor": self.factor,
            "max_factor": max_factor,
            "buffer": self.buffer,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "num_workers": self.num_workers,
            "data set": type(self.dataset.dataset).__name__,
        }
        pace = Pace(board, self.num_workers, max_factor, self._clock) if self.factor == "auto" else None
        return StreamPosition(board, pace, self._clock, settings)

    def _check_room(self, draw_size: int) -> None:
        if self._bound is not None and self._bound.items is not None and self.factor != 1:
            count_residents(self._bound, [], draw_size, max(1, self.num_workers))


class _Iteration(Iterator[Any]):
    """One epoch's batches."""

    def __init__(self, loader: EchoDataLoader, batches: Any) -> None:
        self._loader = loader
        self._batches = batches
        self._number = loader._num_iterations = loader._num_iterations + 1
        loader._clock.ended()
        if isinstance(loader._echo, StreamPosition):
            loader._echo.begin(batches)

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        loader = self._loader
        if self._number != loader._num_iterations:
            raise RuntimeError("this iterator is over: its EchoDataLoader has begun another iteration")
        loader._clock.asked()
        try:
            batch = next(self._batches)
        except StopIteration:
            loader._echo.end()
            self._leave()
            raise
        except BaseException:
            loader._drop_workers(self._batches)
            self._leave()
            raise
        loader._clock.waited()
        loader._echo.gave()
        loader._clock.drawn()
        return batch

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._number == self._loader._num_iterations:  # garbage may be collected during the next iteration
            self._loader._clock.ended()
        self._batches = None


def echo_plan(loader: Any) -> EchoPlan:
    """The EchoPlan in a loader that a trainer rebuilt, for its `state_dict`, `load_state_dict`, `stats`.

    With Accelerate take the state inside the loop: once an iteration was left, how far it came is not known.

    Raises ValueError if there is none.
    """
    for sampler in samplers_of(loader):
        if isinstance(sampler, EchoPlan):
            return sampler
    raise ValueError(
        f"there is no EchoPlan in this {type(loader).__name__}: expected an EchoDataLoader over a map-style data "
        "set, or what Accelerate or Lightning made of one"
    )
