"""What a report says of the runs of a study."""

from xml.etree import ElementTree

import pytest
from rich.console import Console

from stretto.study import Condition, Outcome, Run
from stretto.study.report import markdown, svg, tables, warnings
from stretto.study.summary import Report, summarise
from tests.study.toys import BASELINE, BATCH, BEFORE, WORKERS, make_study

STUDY = make_study(metric="test accuracy, %", target=85, max_fresh_examples=10_000, lr=(0.01, 1.0))


def made(condition: Condition, fresh_examples: int, status: str = "reached", **more: object) -> Run:
    factor = condition.factor
    assert factor != "auto"
    values = {
        "params": {"lr": 0.1, "decay": 0.6},
        "seed": 0,
        "updates": round(factor * fresh_examples / 4),
        "seconds": fresh_examples / 100,
        "best": 85.5 if status == "reached" else 80.25,
        "au_percent": 50.0,
        **more,
    }
    return Run(condition=condition, status=status, fresh_examples=fresh_examples, **values)


def outcome(condition: Condition, *repeats: Run, trials: tuple[Run, ...] = (), is_done: bool = True) -> Outcome:
    trials = trials or (made(condition, 5000), made(condition, 10_000, "missed"))
    return Outcome(condition, trials, 0 if repeats else None, repeats, is_done)


def with_final(condition: Condition, *counts: int) -> Outcome:
    return outcome(condition, *(made(condition, count, final=86 + count / 10_000) for count in counts))


BASE = with_final(BASELINE, 4000, 5000, 6000)


def text(report: Report) -> list[str]:
    """The tables as words."""
    console = Console(width=200)
    with console.capture() as capture:
        for table in tables(report):
            console.print(table)
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_the_best_condition_is_the_verdict_beside_no_echo() -> None:
    report = summarise(STUDY, [BASE, with_final(BATCH, 4000, 4500), with_final(BEFORE, 1400, 1500, 1600)])
    assert report.verdict == (
        "Examples, before augmentation, e = 4 reaches test accuracy 85 % with 0.30 of the fresh examples of no "
        "echo: 1,500 instead of 5,000."
    )
    assert report.next_step == "Next: stretto.echo(loader, 4, buffer=16, augment=augment)"
    assert [row.ratio for row in report.rows] == [None, 0.85, 0.3]
    assert [row.ideal for row in report.rows] == [1.0, 0.5, 0.25]
    results, tuning = text(report)[:4], text(report)[4:]
    assert results == [
        "condition fresh examples N(e) / N(1) 1 / e updates seconds test accuracy, % at 10,000 fresh",
        "no echo 5,000 (4,000 .. 6,000) 1 1 1,250 (1,000 .. 1,500) 50.0 (40.0 .. 60.0) 86.50 (86.40 .. 86.60)",
        "batch echoing, e = 2 4,250 (4,000 .. 4,500) 0.85 0.5 2,125 (2,000 .. 2,250) 42.5 (40.0 .. 45.0) "
        "86.43 (86.40 .. 86.45)",
        "examples, before augmentation, e = 4 1,500 (1,400 .. 1,600) 0.3 0.25 1,500 (1,400 .. 1,600) "
        "15.0 (14.0 .. 16.0) 86.15 (86.14 .. 86.16)",
    ]
    assert tuning == [
        "condition trials reached trials missed trials diverged trials crashed best lr best decay AU %",
        "no echo 1 1 0 0 0.1 0.6 50 (50 .. 50)",
        "batch echoing, e = 2 1 1 0 0 0.1 0.6 50 (50 .. 50)",
        "examples, before augmentation, e = 4 1 1 0 0 0.1 0.6 50 (50 .. 50)",
    ]
    line = "| batch echoing, e = 2 | 4,250 (4,000 .. 4,500) | 0.85 | 0.5 |"
    assert markdown(report).splitlines()[3].startswith(line)
    assert warnings(report) == []


def test_ranges_that_overlap_prove_nothing() -> None:
    report = summarise(STUDY, [BASE, with_final(BATCH, 3900, 4001)])
    assert report.verdict == (
        "No condition clearly needs fewer fresh examples to test accuracy 85 % than no echo: the seeds' ranges "
        "overlap."
    )
    assert report.next_step.startswith("Next: more --seeds")


def test_the_smallest_mean_does_not_hide_a_condition_that_is_clear() -> None:
    scattered = with_final(BEFORE, 200, 300, 9010)
    report = summarise(STUDY, [BASE, scattered, with_final(BATCH, 3500, 3600, 3700)])
    assert report.rows[1].ratio < report.rows[2].ratio
    assert report.verdict.startswith("Batch echoing, e = 2 reaches test accuracy 85 % with 0.72 of")
    assert report.next_step == 'Next: stretto.echo(loader, 2, unit="batch", buffer=4)'


def test_an_echo_that_is_clearly_worse_is_said_to_be() -> None:
    report = summarise(STUDY, [BASE, with_final(BATCH, 7000, 8000)])
    assert report.verdict == "Every condition needs more fresh examples to test accuracy 85 % than no echo."


def test_one_seed_may_be_chance() -> None:
    report = summarise(STUDY, [with_final(BASELINE, 5000), with_final(BATCH, 3500)])
    assert report.verdict.endswith("3,500 instead of 5,000, with one seed each, which may be chance.")


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([BASE], "Nothing to compare: no echo was run alone. It reaches test accuracy 85 % as the table says."),
        ([with_final(BATCH, 10)], 'Nothing to compare: no echo was not run. Add "none" to the variants.'),
    ],
)
def test_a_study_without_two_sides_says_which_is_missing(outcomes: list[Outcome], expected: str) -> None:
    assert summarise(STUDY, outcomes).verdict == expected


def test_a_target_that_trials_alone_reached_is_not_said_to_be_never_reached() -> None:
    report = summarise(STUDY, [outcome(BASELINE, made(BASELINE, 10_000, "missed"))])
    assert report.verdict == (
        "The target, test accuracy 85 %, was reached by trials, but by no repeat of the best: best value 85.5, "
        "with no echo."
    )


def test_a_target_that_was_never_reached_is_said_with_the_best_value() -> None:
    missed = [
        outcome(
            condition, made(condition, 10_000, "missed", best=best), trials=(made(condition, 10_000, "missed"),)
        )
        for condition, best in ((BASELINE, 79.0), (BEFORE, 84.125))
    ]
    report = summarise(STUDY, missed)
    assert report.verdict == (
        "The target, test accuracy 85 %, was never reached within 10,000 fresh examples: best value 84.12, with "
        "examples, before augmentation, e = 4."
    )
    assert "no echo never reached (best value 80.2) - 1 - -" in text(report)
    assert report.next_step.startswith("Next: another target, a larger max_fresh_examples")
    down = make_study(higher_is_better=False, target=85, metric="loss")
    assert "best value 79, with no echo" in summarise(down, missed).verdict


def test_an_echo_in_the_workers_has_a_next_step_of_its_own() -> None:
    best = with_final(WORKERS, 1400, 1500)
    step = "Next: stretto.EchoDataLoader(dataset, 4, ..., factor=4, buffer=16{})"
    assert summarise(STUDY, [BASE, best]).next_step == step.format(", augment=augment")
    plain = make_study(metric="test accuracy, %", has_augment=False)
    assert summarise(plain, [BASE, best]).next_step == step.format("")


def test_a_final_metric_that_some_seeds_lack_says_of_how_many_it_is() -> None:
    echoed = outcome(BEFORE, made(BEFORE, 1400, final=86.0), made(BEFORE, 1500), made(BEFORE, 1600, final=86.2))
    none = outcome(BATCH, made(BATCH, 1400), made(BATCH, 1500))
    report = summarise(STUDY, [BASE, echoed, none])
    assert [row.num_final for row in report.rows] == [3, 2, 0]
    cells = [line.split(" | ")[-1] for line in markdown(report).splitlines()[2:5]]
    assert cells == ["86.50 (86.40 .. 86.60) |", "86.10 (86.00 .. 86.20); 2 of 3 seeds |", "- |"]
    assert "at 10,000 fresh" not in markdown(summarise(STUDY, [none]))


def test_a_seed_that_missed_the_target_leaves_no_ratio() -> None:
    echoed = outcome(BEFORE, made(BEFORE, 1000), made(BEFORE, 10_000, "missed"))
    report = summarise(STUDY, [BASE, echoed])
    assert report.rows[1].ratio is None
    assert report.verdict.startswith("Nothing to compare: test accuracy 85 % was not reached by all repeats")
    row = "examples, before augmentation, e = 4 1,000 (1,000 .. 1,000); 1 of 2 seeds - 0.25 1,000"
    assert any(line.startswith(row) for line in text(report))


def test_diverged_and_crashed_trials_are_counted_and_told() -> None:
    trials = (
        made(BEFORE, 5000),
        made(BEFORE, 40, "diverged", error="FloatingPointError: loss is nan"),
        made(BEFORE, 40, "crashed", error="Traceback ...\nOSError: no space left\n"),
    )
    report = summarise(STUDY, [BASE, outcome(BEFORE, made(BEFORE, 1000), trials=trials)])
    assert warnings(report) == [
        "examples, before augmentation, e = 4: 1 of 4 runs diverged, the last with FloatingPointError: loss is nan",
        "examples, before augmentation, e = 4: 1 of 4 runs crashed, the last with OSError: no space left",
    ]
    assert text(report)[-1].startswith("examples, before augmentation, e = 4 1 0 1 1 0.1")


def test_a_condition_whose_trials_all_failed_says_so() -> None:
    trials = (made(BEFORE, 40, "crashed", error="OSError: no", best=None),)
    report = summarise(STUDY, [BASE, outcome(BEFORE, trials=trials)])
    assert any("e = 4 all trials diverged or crashed - 0.25 - -" in line for line in text(report))
    alone = summarise(STUDY, [outcome(BEFORE, trials=trials)])
    assert alone.verdict == "No run went to its end: 1 trials crashed, 0 diverged."
    assert alone.next_step == "Next: mend what crashes, then the same command with --retry-crashed."
    diverged = outcome(BEFORE, trials=(made(BEFORE, 40, "diverged", error="nan", best=None),))
    assert summarise(STUDY, [diverged]).next_step.startswith("Next: lower learning rates")


def test_a_best_trial_at_the_edge_of_its_range_is_a_warning_and_the_next_step() -> None:
    edge = made(BEFORE, 1000, params={"lr": 0.9, "decay": 0.6})
    report = summarise(STUDY, [BASE, outcome(BEFORE, made(BEFORE, 1000), trials=(edge,))])
    assert warnings(report) == [
        "examples, before augmentation, e = 4: the best trial's lr = 0.9 is at the upper end of its range, "
        "0.01 .. 1: a better one may lie beyond"
    ]
    assert report.next_step == "Next: stretto.echo(loader, 4, buffer=16, augment=augment)"
    unclear = summarise(STUDY, [BASE, outcome(BEFORE, made(BEFORE, 5000), trials=(edge,))])
    assert unclear.next_step.startswith("Next: more --trials")


def test_a_study_in_the_middle_says_so() -> None:
    report = summarise(STUDY, [BASE, Outcome(BEFORE, (), None, (), False)])
    assert report.verdict == "Not finished: some runs are still to be made."
    assert any("e = 4 not run yet" in line for line in text(report))


def test_titles_name_buffer_and_batch_size_where_there_are_several() -> None:
    conditions = [Condition("before", 2, 4, 4), Condition("before", 2, 8, 4), Condition("before", 2, 4, 16)]
    report = summarise(STUDY, [Outcome(condition, (), None, (), False) for condition in (BASELINE, *conditions)])
    assert [row.title for row in report.rows] == [
        "no echo, batch 4",
        "examples, before augmentation, e = 2, buffer 4, batch 4",
        "examples, before augmentation, e = 2, buffer 8, batch 4",
        "examples, before augmentation, e = 2, buffer 4, batch 16",
    ]


def test_the_picture_has_a_bar_its_range_and_the_ideal_for_each_condition_that_reached_the_target() -> None:
    report = summarise(STUDY, [BASE, with_final(BEFORE, 1400, 1600), outcome(BATCH, made(BATCH, 10_000, "missed"))])
    picture = ElementTree.fromstring(svg(report))
    elements = [element.get("class") for element in picture.iter()]
    assert [elements.count(kind) for kind in ("bar", "range", "ideal")] == [2, 2, 1]
    words = [element.text for element in picture.iter() if element.text]
    assert "1,500 (0.30)" in words
    assert "never reached, but in 1 trials (best value 85.5)" in words
    widths = [float(bar.get("width", 0)) for bar in picture.iter() if bar.get("class") == "bar"]
    assert widths[1] / widths[0] == pytest.approx(0.3, rel=0.01)


def test_a_report_is_plain_values_with_every_run() -> None:
    plain = summarise(STUDY, [BASE, with_final(BEFORE, 1400, 1600)]).to_plain()
    assert plain["version"] == 1
    assert plain["study"] == STUDY.fingerprint
    echoed = plain["conditions"][1]
    assert echoed["condition"]["variant"] == "before"
    assert echoed["fresh_examples"] == {"mean": 1500.0, "low": 1400, "high": 1600}
    assert [run["fresh_examples"] for run in echoed["repeat_runs"]] == [1400, 1600]
