"""The conditions that a study compares: where to echo, how often, from which buffer, in batches of which size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from stretto.echo.factor import Factor, check_factor
from stretto.study.study import Study, check_count

Variant = Literal["none", "batch", "after", "before", "workers"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
TITLES: dict[Variant, str] = {
    "none": "no echo",
    "batch": "batch echoing",
    "after": "examples, after augmentation",
    "before": "examples, before augmentation",
    "workers": "examples, in the workers",
}
_OPTIONAL: Variant = "workers"  # it needs a DataLoader, which not every training has


@dataclass(frozen=True, slots=True)
class Condition:
    """One way to feed the training. Raises TypeError or ValueError for what cannot work."""

    variant: Variant
    factor: Factor
    """Uses of each example, or "auto"; 1 for "none"."""
    buffer_batches: int
    """Batches (or their examples) that stay resident; 1 for "none", which only passes batches on."""
    batch_size: int

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant {self.variant!r}: expected one of {', '.join(VARIANTS)}")
        object.__setattr__(self, "factor", check_factor(self.factor))
        check_count("buffer_batches", self.buffer_batches)
        check_count("batch_size", self.batch_size)
        if self.variant == "none" and (self.factor, self.buffer_batches) != (1, 1):
            raise ValueError(
                f'variant "none" with factor={self.factor}, buffer_batches={self.buffer_batches}: expected 1 and 1'
            )
        if self.variant != "none" and self.factor == 1:
            raise ValueError(
                f'factor=1 with variant "{self.variant}": that is no echo, which is variant "none"; expected a '
                'factor > 1 or "auto"'
            )

    @classmethod
    def baseline(cls, batch_size: int) -> "Condition":
        """No echo."""
        return cls("none", 1.0, 1, batch_size)

    @property
    def key(self) -> str:
        """A short text that stays the same: what a storage knows the condition by."""
        if self.variant == "none":
            return f"none b{self.batch_size}"
        return f"{self.variant} e{_text(self.factor)} buffer{self.buffer_batches} b{self.batch_size}"

    @property
    def title(self) -> str:
        """The condition in words."""
        if self.variant == "none":
            return f"{TITLES['none']}, batch {self.batch_size}"
        echo = f"e = {_text(self.factor)}, buffer {self.buffer_batches}, batch {self.batch_size}"
        return f"{TITLES[self.variant]}, {echo}"


def plan(
    study: Study,
    factors: Sequence[Factor] = (2.0, 4.0),
    variants: Sequence[str] | None = None,
    buffers: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
) -> list[Condition]:
    """The conditions of a study, each once: for each batch size the baseline, then every combination.

    Args:
        study: what is trained.
        factors: numbers > 1, or "auto".
        variants: of VARIANTS; default: all that the study has, so "before" only with an augmentation, but without
            "workers", which needs a torch DataLoader over a map-style data set.
        buffers: in batches; default: the study's.
        batch_sizes: default: the study's.

    Raises TypeError or ValueError for what cannot work, such as a batch that is larger than the study's budget.
    """
    possible = [variant for variant in VARIANTS if study.has_augment or variant != "before"]
    if variants is None:
        variants = [variant for variant in possible if variant != _OPTIONAL]
    for variant in variants:
        if variant not in VARIANTS:
            raise ValueError(f"variant {variant!r}: expected one of {', '.join(VARIANTS)}")
        if variant not in possible:
            raise ValueError(
                f'variant "{variant}" needs an augmentation, and the study says has_augment=False: expected one of '
                f"{', '.join(possible)}"
            )
    found: dict[Condition, None] = {}
    for batch_size in batch_sizes or (study.batch_size,):
        if "none" in variants:
            found[Condition.baseline(batch_size)] = None
        for buffer in buffers or (study.buffer_batches,):
            for variant in variants:
                if variant != "none":
                    found |= {Condition(variant, factor, buffer, batch_size): None for factor in factors}  # type: ignore[arg-type]
    if not found:
        raise ValueError("there is nothing to run: expected a variant, and factors unless it is none")
    check_batches(study, found)
    return list(found)


def check_batches(study: Study, conditions: Iterable[Condition]) -> None:
    """Raise ValueError for a condition whose batches are larger than the study's budget of fresh examples."""
    for condition in conditions:
        if condition.batch_size > study.max_fresh_examples:
            raise ValueError(
                f"batch_size={condition.batch_size}: expected at most the study's budget, "
                f"max_fresh_examples={study.max_fresh_examples}, which is spent in one update otherwise"
            )


def _text(factor: Factor) -> str:
    return factor if isinstance(factor, str) else f"{factor:g}"
