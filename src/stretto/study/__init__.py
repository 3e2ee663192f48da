"""The protocol of data echoing as a tool: what a training needs, in fresh examples, with and without echo.

After Choi, Passos, Shallue, Dahl, "Faster Neural Network Training with Data Echoing", arXiv 1907.05550: each
condition (insertion point, factor, buffer, batch size) has its learning rate and schedule tuned with the same
number of trials, and its best is repeated with fresh seeds.

    study.py       Study: a training function, a target, ranges; load_study
    conditions.py  Condition, plan: what is compared
    settings.py    Settings: what a training function gets, with the learning rate of every update
    loader.py      make_loader: the echo of a condition around the user's batches, counted
    in_workers.py  the same in the worker processes of the user's DataLoader
    run.py         Run, run: one training, to the target or to the end of its budget
    points.py      which settings a trial has
    records.py     finished runs as lines of JSON
    storage.py     the SQLite file of a study's state, by Optuna: who makes which run
    search.py      Search: trials, then repeats, by any number of processes
    rows.py        Row: what the runs of a condition say
    verdict.py     what the rows come to, and what to do next
    summary.py     Report: both
    report.py      Report as table, Markdown, JSON and picture

    Study -> plan -> Search { storage <-> run(Settings, MakeLoader) } -> Report

A study's file, for `stretto study FILE.py`:

    def train(settings, make_loader, seed):
        torch.manual_seed(seed)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), settings.lr, momentum=0.9, nesterov=True)
        fresh = DataLoader(data, settings.batch_size, shuffle=True, drop_last=True)
        for update, (x, y) in enumerate(make_loader(fresh, augment)):
            for group in optimizer.param_groups:
                group["lr"] = settings.rate(update)
            ...  # an optimizer step
            yield (lambda: accuracy(model)) if (update + 1) % 50 == 0 else None

    study = Study(train, metric="test accuracy, %", target=85, max_fresh_examples=600_000, lr=(0.003, 0.3))
"""

from stretto.study.conditions import VARIANTS, Condition, plan
from stretto.study.loader import MakeLoader, make_loader
from stretto.study.run import Run, run
from stretto.study.search import Outcome, Progress, Search, Watcher
from stretto.study.settings import Settings
from stretto.study.study import Study, TrainError, load_study

__all__ = [
    "VARIANTS",
    "Condition",
    "MakeLoader",
    "Outcome",
    "Progress",
    "Run",
    "Search",
    "Settings",
    "Study",
    "TrainError",
    "Watcher",
    "load_study",
    "make_loader",
    "plan",
    "run",
]
