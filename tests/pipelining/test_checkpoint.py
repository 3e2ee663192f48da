"""Saved and loaded at any step, training goes on as if nothing had been."""

import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

from stretto.pipelining import Repairs, Simulation, simulate
from tests.pipelining.training import Run, adamw, convolutions, falling, images, nadam, rows, sgd, simulation_of


def go_on(simulation: Simulation, run: Run) -> list[Any]:
    """Train on the batches that are left; the losses and every tensor of every block."""
    losses = [simulation.step(x, target=y) for x, y in run.epochs[0][simulation.num_batches :]]
    simulation.flush()
    return losses + tensors(simulation)


def tensors(simulation: Simulation) -> list[torch.Tensor]:
    return [value for block in simulation.blocks for value in block.module.state_dict().values()]


def same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def passing_through(state: Any, path: Path) -> Any:
    """`state` as it comes back from a file that holds no code."""
    torch.save(state, path)
    return torch.load(path, weights_only=True)


class Nested(nn.Linear):
    def forward(self, given: Any) -> Any:
        value = super().forward(given["inner"][0] if isinstance(given, dict) else given)
        return {"inner": (value, None, 3), "mask": value > 0, "kind": "text"}


class Last(nn.Linear):
    def forward(self, given: Any) -> torch.Tensor:
        assert type(given["inner"]) is tuple
        assert given["inner"][1:] == (None, 3)
        assert given["kind"] == "text"
        return super().forward(given["inner"][0] * given["mask"])


class Recurrent(nn.LSTM):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return super().forward(given)[0]


def nested() -> list[nn.Module]:
    return [Nested(6, 6), Nested(6, 6), Last(6, 4)]


def in_phases(optimizer: torch.optim.Optimizer) -> SequentialLR:
    rising = LinearLR(optimizer, 0.5, total_iters=2)
    return SequentialLR(optimizer, [rising, MultiStepLR(optimizer, [1, 2], gamma=0.5)], milestones=[2])


RUNS = {
    "AdamW, open groups, scheduler": Run(
        optimizer=adamw, scheduler=falling, options={"p": 1, "accumulate": 2, "seed": 3}
    ),
    "Nesterov, open groups": Run(options={"p": 1, "accumulate": 3, "clip": 0.5}),
    "stashed, AdamW, open groups": Run(
        optimizer=adamw, options={"p": 1, "accumulate": 2, "backward_params": "stashed"}
    ),
    "stashed, Nesterov, phases": Run(scheduler=in_phases, options={"p": 1, "backward_params": "stashed"}),
    "predicted, discount, warm-up": Run(
        optimizer=nadam, options={"p": 1, "repairs": Repairs(predict=True, discount=0.5, warmup=4)}
    ),
    "channels_last": Run(layers=convolutions, epochs=[images(5)], options={"p": 1}),
    "nested outputs": Run(blocks=nested, epochs=[rows(5)]),
    "stashed LSTM": Run(
        blocks=lambda: [Recurrent(6, 5), nn.Dropout(0.5), Recurrent(5, 4)],
        epochs=[rows(4)],
        options={"p": 1, "backward_params": "stashed"},
    ),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_resume_at_every_step_equals_uninterrupted_run(run: Run, tmp_path: Path) -> None:
    run = replace(run, epochs=[run.epochs[0][:7]])
    expected = go_on(simulation_of(run), run)
    saved = simulation_of(run)
    for n, (x, y) in enumerate([*run.epochs[0], (None, None)]):
        saved.save(tmp_path / "saved")
        resumed = simulation_of(run)
        resumed.load(tmp_path / "saved")
        assert resumed.num_batches == n
        assert same(expected[n:], go_on(resumed, run)), n
        if x is not None:
            saved.step(x, target=y)
    assert same(expected, expected[:n] + go_on(saved, run)), "saving changes nothing"


def test_a_state_is_plain_and_loads_as_often_as_one_likes(tmp_path: Path) -> None:
    run = RUNS["stashed, AdamW, open groups"]
    trained = simulation_of(run)
    for x, y in run.epochs[0][:5]:
        trained.step(x, target=y)
    state = trained.state_dict()
    expected = go_on(trained, run)
    assert same(expected, go_on(build_from(run, passing_through(state, tmp_path / "state.pt")), run))
    for _ in range(2):
        assert same(expected, go_on(build_from(run, state), run)), "training on changes no state"


def build_from(run: Run, state: Any) -> Simulation:
    made = simulation_of(run)
    made.load_state_dict(state)
    return made


def test_loading_in_the_middle_drops_what_is_under_way() -> None:
    run = RUNS["AdamW, open groups, scheduler"]
    simulation = simulation_of(run)
    first = simulation.state_dict()
    expected = go_on(simulation, run)
    simulation = simulation_of(run)
    for x, y in rows(6):
        simulation.step(-x, target=y)
    simulation.load_state_dict(first)
    assert same(expected, go_on(simulation, run))


OTHERS = {
    "K": (Run(options={"p": 1}), 2, r"'DSP\(1,1,0; 4,2,0\)', this pipeline has staleness='DSP\(1,0; 2,0\)'"),
    "m": (Run(options={"p": 1, "m": (5, 2, 0)}), 3, r"4,2,0\)', this pipeline has staleness='DSP\(1,1,0; 5,2,0\)'"),
    "p": (Run(options={"p": 2, "m": (4, 2, 0)}), 3, r"1,1,0; 4,2,0\)', .* has staleness='DSP\(2,2,0; 4,2,0\)'"),
    "stashed": (Run(options={"p": 1, "backward_params": "stashed"}), 3, r"4,2,0\)', .*4,2,0; stashed\)'"),
    "accumulate": (Run(options={"p": 1, "accumulate": 2}), 3, "accumulate=1, this pipeline has accumulate=2"),
    "seed": (Run(options={"p": 1, "seed": 7}), 3, "seed=0, this pipeline has seed=7"),
    "optimizer": (Run(optimizer=adamw, options={"p": 1}), 3, "optimizer='SGD', .* has optimizer='AdamW'"),
    "scheduler": (Run(scheduler=falling, options={"p": 1}), 3, "lr_scheduler=None, .* has lr_scheduler='LambdaLR'"),
    "weights": (
        Run(layers=convolutions, options={"p": 1}),
        3,
        r"0.0.weight of block 0 has the shape torch.Size\(\[4, 2, 3, 3\]\), the given one torch.Size\(\[8, 6\]\)",
    ),
}


@pytest.mark.parametrize(("run", "num_blocks", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_a_state_of_another_pipeline_is_refused_with_both_values(
    run: Run, num_blocks: int, message: str, tmp_path: Path
) -> None:
    saved = simulation_of(Run(options={"p": 1}))
    saved.step(*rows(1)[0])
    saved.save(tmp_path / "saved")
    other = simulation_of(run, num_blocks)
    before = [value.clone() for value in tensors(other)]
    with pytest.raises(ValueError, match=message):
        other.load(tmp_path / "saved")
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved.state_dict())
    assert same(before, tensors(other))


def test_groups_of_other_parameters_are_refused() -> None:
    def of_weights(optimizer: Callable[..., Any], turned: bool) -> Simulation:
        block = nn.Linear(6, 4)
        parameters = list(block.parameters())
        return simulate(
            [block], [optimizer(parameters[::-1] if turned else parameters)], nn.functional.cross_entropy
        )

    state = of_weights(sgd, False).state_dict()
    with pytest.raises(
        ValueError, match=r"\[\['0.bias', '0.weight'\]\], that of the state \[\['0.weight', '0.bias'"
    ):
        of_weights(sgd, True).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"version": 2, "blocks": []}, {"version": 0, "settings": {}}])
def test_something_else_is_no_state(state: Any) -> None:
    with pytest.raises(ValueError, match=r"is of version .*, expected 1"):
        simulation_of(Run()).load_state_dict(state)


def test_a_folder_that_is_no_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    simulation = simulation_of(Run())
    with pytest.raises(FileNotFoundError, match=r"nothing: expected a folder that save\(\) wrote"):
        simulation.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"is no checkpoint, or not a whole one: it has no \.metadata"):
        simulation.load(tmp_path)
    simulation.save(tmp_path / "saved")

    def load_without(name: str) -> None:
        broken = shutil.copytree(tmp_path / "saved", tmp_path / f"without {name}")
        (broken / name).unlink()
        simulation.load(broken)

    with pytest.raises(ValueError, match=r"has no block_1.pt, but \['block_0.pt', 'block_2.pt'\]"):
        load_without("block_1.pt")
    with pytest.raises(ValueError, match=r"(?s)tensors of block 0 in .*cannot be read.*__0_0.distcp"):
        load_without("__0_0.distcp")
    (tmp_path / "saved" / "block_2.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"block_2.pt cannot be read"):
        simulation.load(tmp_path / "saved")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_parents_are_made_older_checkpoints_replaced_and_leftovers_removed(tmp_path: Path) -> None:
    simulation = simulation_of(Run())
    folder = tmp_path / "runs" / "last"
    simulation.save(folder)
    simulation.step(*rows(1)[0])
    for name in ("last.stretto-saving", "last.stretto-replaced"):
        (folder.parent / name).mkdir()
    simulation.save(folder)
    assert names_in(folder.parent) == ["last"]
    resumed = simulation_of(Run())
    resumed.load(folder)
    assert resumed.num_batches == 1


def test_a_crash_between_the_two_renames_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    simulation = simulation_of(Run())
    simulation.save(tmp_path / "last")
    (tmp_path / "last").rename(tmp_path / "last.stretto-replaced")
    simulation.load(tmp_path / "last")
    simulation.step(*rows(1)[0])
    simulation.save(tmp_path / "last")
    assert names_in(tmp_path) == ["last"]


def test_a_folder_with_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="exists and is no checkpoint: it is not replaced"):
        simulation_of(Run()).save(tmp_path)
    assert names_in(tmp_path) == ["thesis.tex"]
    assert not tmp_path.with_name(tmp_path.name + ".stretto-saving").exists()


def test_a_disk_that_is_full_leaves_the_older_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulation_of(Run())
    simulation.save(tmp_path / "last")
    simulation.step(*rows(1)[0])

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        simulation.save(tmp_path / "last")
    assert names_in(tmp_path) == ["last"]
    resumed = simulation_of(Run())
    resumed.load(tmp_path / "last")
    assert resumed.num_batches == 0


Pair = namedtuple("Pair", ["left", "right"])


class OfPairs(nn.Linear):
    def forward(self, given: Any) -> torch.Tensor:
        return super().forward(given.left + given.right)


def test_batches_under_way_of_another_type_are_refused_until_flushed() -> None:
    blocks = [OfPairs(6, 5), nn.Linear(5, 4)]
    simulation = simulate(blocks, [sgd(block.parameters()) for block in blocks], nn.functional.cross_entropy)
    (x, y), *_ = rows(1)
    simulation.step(Pair(x, x), target=y)
    with pytest.raises(TypeError, match=r"batch 0 in block 0 is a Pair: .*call flush\(\) before saving"):
        simulation.state_dict()
    simulation.flush()
    assert simulation.state_dict()["blocks"][0]["flights"] == []


def test_the_weights_stand_under_their_names_for_torch_to_read(tmp_path: Path) -> None:
    simulation = simulation_of(Run(optimizer=adamw))
    for x, y in rows(4):
        simulation.step(x, target=y)
    simulation.save(tmp_path / "saved")
    target = {
        "model": {"0.0.weight": torch.zeros(8, 6)},
        "optimizer": {"state": {"0.0.weight": {"exp_avg": torch.zeros(8, 6)}}},
    }
    reader = torch.distributed.checkpoint.FileSystemReader(tmp_path / "saved")
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(target, storage_reader=reader)
    [weight] = [p for name, p in simulation.blocks[0].module.named_parameters() if name == "0.weight"]
    assert torch.equal(target["model"]["0.0.weight"], weight)
    assert torch.equal(
        target["optimizer"]["state"]["0.0.weight"]["exp_avg"],
        simulation.blocks[0].optimizer.state[weight]["exp_avg"],
    )
