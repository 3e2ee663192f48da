"""The rows of `accuracy.py`'s tables: every method on every workload, and the grids of learning rates."""

from dataclasses import dataclass, replace

from accuracy_runs import Condition

from stretto.pipelining import Staleness

K = 4
MICRO_BATCHES = 4
OPTIMIZERS = {"nesterov": "SGD, Nesterov", "sgd": "SGD, momentum", "adamw": "AdamW", "nadam": "NAdam"}
MAP_STALENESS = (0, 1, 2, 4)
"""Multiples of m_k = K-1-k."""
MAP_RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)
MAX_RATES = 6
RATE_SEED = 100
WEIGHT_DECAY = {"nesterov": 0.0, "sgd": 0.0, "adamw": 0.01, "nadam": 0.01}
"""torch's own default of each (that of AdamW for NAdam)."""
MORE_WEIGHT_DECAY = 5e-4


@dataclass(frozen=True, slots=True)
class Row:
    """A method on a workload."""

    title: str
    base: Condition
    """A run of it; the rate, the seed and the split are put in."""
    num_seeds: int
    rate_seeds: int
    """Runs at each rate, to choose one."""
    rate_updates: int
    """Updates of these runs."""
    group: str = ""
    """Compared with the first row of the same group."""

    def on(self, split: str, lr: float, seed: int, updates: int | None = None) -> Condition:
        """One run."""
        return replace(self.base, split=split, lr=lr, seed=seed, updates=updates or self.base.updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A table."""

    name: str
    title: str
    rows: tuple[Row, ...]
    rates: tuple[float, ...]
    """The grid to begin with; it grows by factors of 2 while the best rate is at its edge."""
    bars: tuple[str, ...] = ()
    """Titles of the rows that have to come within 0.5 points of what they are compared with."""

    @property
    def remark(self) -> str:
        """How the rates were chosen."""
        ways = sorted({(row.num_seeds, row.rate_seeds, row.rate_updates) for row in self.rows}, reverse=True)
        (_, runs, updates), *others = ways
        by = f"{runs} runs" if runs > 1 else "one run"
        where = "".join(f" (one of {fewer:,} in the rows of {seeds} seeds)" for seeds, _, fewer in others)
        return f"Each row's rate is the best of a grid, by {by} of {updates:,} updates{where} on other examples."


def full_plans(*, full: bool, seeds: int) -> list[Plan]:
    """All tables. `seeds` of a row, twice as many on the digits; on Fashion-MNIST 3 where there is no bar.

    All repairs are tried on the digits, elsewhere only if `full`: that is what 90 minutes on two cores allow.
    """
    fashion = _Maker("fashion-full" if full else "fashion", 9372 if full else 2250, "nesterov", seeds, 2)
    digits = _Maker("digits", 800, "nesterov", 2 * seeds, 2)
    updates = 9000 if full else 3000
    text = _Maker("text", updates, "adamw", min(3, seeds), rate_updates=updates // 3)
    short = _Maker(fashion.workload, 750, "nesterov", seeds)
    few = seeds if full else min(3, seeds)
    return [
        Plan(
            name="fashion",
            title=f"Fashion-MNIST, {50_000 if full else 12_000:,} images, {fashion.updates:,} updates of 64",
            rows=(
                *fashion.methods(few),
                *(fashion.row(f"DSP, K = {k}", _default(k)) for k in (2, 3)),
                *(fashion.repairs(few) if full else fashion.repairs(few)[:2]),
                *(fashion.with_weight_decay(few) if full else ()),
            ),
            rates=(0.05, 0.1, 0.2),
            bars=tuple(f"DSP, K = {k}" for k in (2, 3, 4)),
        ),
        Plan(
            name="short",
            title="Fashion-MNIST, short: 750 updates of 64",
            rows=(
                short.row("backpropagation", _backprop()),
                short.row(f"DSP, K = {K}", _default(K)),
                short.row(f"FR, K = {K}", _default(K), optimizer="sgd"),
                short.row(f"DSP, long queues, K = {K}", Staleness.dsp(K)),
                short.row(f"DSP, long queues, K = {K}, warm-up", Staleness.dsp(K), warmup=True),
            ),
            rates=(0.05, 0.1, 0.2),
        ),
        Plan(
            name="digits",
            title="digits of 8x8, 1,297 images, 20 epochs of 40 updates of 32",
            rows=(*digits.methods(), *digits.repairs(2 * seeds)),
            rates=(0.025, 0.05, 0.1),
        ),
        Plan(
            name="text",
            title=(
                f"English definitions, a character-level Transformer, {text.updates:,} updates of 16 x 64, "
                "the first tenth with a rising rate"
            ),
            rows=(
                *text.methods(),
                *(text.repairs(min(2, seeds)) if full else ()),
                *text.other_optimizer("nadam"),
            ),
            rates=(0.001, 0.002, 0.004),
        ),
    ]


def quick_plans() -> list[Plan]:
    """Every kind of row, on made-up digits and for a moment."""
    quick = _Maker("made-up", 8, "nesterov", 1, rate_updates=4)
    rows = (*quick.methods(), *quick.repairs(1)[-4:])
    return [Plan(name="made-up", title="made-up digits", rows=rows, rates=(0.05,))]


def map_conditions(workload: str) -> dict[tuple[int, float], Condition]:
    """The runs of the map, by multiple of m_k = K-1-k and rate: 750 updates, held-out images."""
    found = {}
    for times in MAP_STALENESS:
        spec = _backprop() if times == 0 else Staleness.of(K, m=[times * (K - 1 - k) for k in range(K)])
        if times == 1:
            spec = _default(K)
        for lr in MAP_RATES:
            row = _Maker(workload, 750, "nesterov", 1).row("", spec)
            found[times, lr] = row.on("held-out", lr, RATE_SEED)
    return found


def _default(num_blocks: int) -> Staleness:
    return Staleness.of(num_blocks)


def _backprop() -> Staleness:
    # The number of blocks makes no difference to the bits, and one block costs least.
    return Staleness.backprop(1)


@dataclass(frozen=True, slots=True)
class _Maker:
    workload: str
    updates: int
    optimizer: str
    num_seeds: int
    rate_seeds: int = 1
    rate_updates: int = 0
    """0: all. Rows of fewer seeds get one run of half as many, to choose a rate."""

    def row(
        self, title: str, spec: Staleness, num_seeds: int | None = None, group: str = "", **changed: object
    ) -> Row:
        settings = {
            "optimizer": self.optimizer,
            "updates": self.updates,
            "lr": 0.0,
            "seed": 0,
            "split": "",
        } | changed
        settings = {"weight_decay": WEIGHT_DECAY[str(settings["optimizer"])]} | settings
        base = Condition(workload=self.workload, staleness=str(spec), **settings)
        num_seeds = num_seeds or self.num_seeds
        rate_seeds, rate_updates = self.rate_seeds, self.rate_updates or self.updates
        if num_seeds < self.num_seeds:
            rate_seeds, rate_updates = 1, rate_updates // 2
        return Row(title, base, num_seeds, rate_seeds, rate_updates, group)

    def methods(self, peer_seeds: int | None = None) -> list[Row]:
        """The methods at K = 4; one optimizer, but for FR, whose paper has plain momentum."""
        is_text, few = self.workload == "text", peer_seeds
        rows = [self.row("backpropagation", _backprop())]
        if not is_text:
            micro_batches = f"GPipe, {MICRO_BATCHES} micro-batches"
            rows.append(self.row("backpropagation, plain momentum", _backprop(), few, optimizer="sgd"))
            rows.append(self.row(micro_batches, _backprop(), few, accumulate=MICRO_BATCHES))
        rows.append(self.row(f"DSP, K = {K}", _default(K)))
        if not is_text:
            rows.append(self.row(f"FR, K = {K}", _default(K), few, optimizer="sgd"))
        return [
            *rows,
            self.row(f"DDG, K = {K}", Staleness.delayed_gradients(K), few),
            self.row(f"DSP, long queues, K = {K}", Staleness.dsp(K), few),
            self.row(f"DGL, K = {K}", Staleness.backprop(K), few, learner="dgl"),
            self.row(f"DNI, K = {K}", Staleness.backprop(K), few, learner="dni"),
        ]

    def repairs(self, num_seeds: int) -> list[Row]:
        """Each repair of the default's and of longer queues' staleness."""
        changes: dict[str, dict[str, object]] = {
            f"accumulate={MICRO_BATCHES}": {"accumulate": MICRO_BATCHES},
            "predict": {"predict": True},
            "discount": {"discount": 1.0},
            "warm-up": {"warmup": True},
        }
        return [
            self.row(f"{title}, K = {K}, {name}", spec, num_seeds, **change)
            for title, spec in (("DSP", _default(K)), ("DSP, long queues", Staleness.dsp(K)))
            for name, change in changes.items()
            if self.workload != "text" or name == "predict" or ("long" in title and name != "warm-up")
        ]

    def with_weight_decay(self, num_seeds_of_repair: int) -> list[Row]:
        """The default, and its strongest repair, with the weight decay that is usual for images."""
        settings: dict[str, object] = {"group": "weight decay", "weight_decay": MORE_WEIGHT_DECAY}
        return [
            self.row("backpropagation, weight decay", _backprop(), **settings),
            self.row(f"DSP, K = {K}, weight decay", _default(K), **settings),
            self.row(
                f"DSP, K = {K}, weight decay, accumulate={MICRO_BATCHES}",
                _default(K),
                num_seeds_of_repair,
                accumulate=MICRO_BATCHES,
                **settings,
            ),
        ]

    def other_optimizer(self, optimizer: str) -> list[Row]:
        """The rows that are tried with another optimizer."""
        name = OPTIMIZERS[optimizer]
        settings: dict[str, object] = {"group": name, "optimizer": optimizer}
        return [
            self.row(f"backpropagation, {name}", _backprop(), **settings),
            self.row(f"DSP, {name}, K = {K}", _default(K), **settings),
            self.row(f"DSP, long queues, {name}, K = {K}", Staleness.dsp(K), **settings),
        ]
