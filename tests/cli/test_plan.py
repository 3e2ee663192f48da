"""`stretto plan`, in this process: what it prints, what it writes, what it refuses."""

import json
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from stretto.cli.main import app
from stretto.pipelining import measure
from stretto.pipelining import plan as planning
from stretto.pipelining.events import BlockTimes

NET = """
import torch
from torch import nn

def model():
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)])

def tied():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return [first, second]

listed = [nn.Linear(6, 6), nn.ReLU()]
broken = lambda: 1 / 0
branches = nn.Bilinear(6, 6, 6)
sample = torch.randn(16, 6)
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)  # puts sys.path back afterwards
    file = tmp_path / "net.py"
    file.write_text(NET)
    return file


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer takes 1 ms forward and 2 ms backward."""
    monkeypatch.setattr(
        planning,
        "measure_layers",
        lambda layers, sample: BlockTimes.even(len(layers), len(layers) / 1e3, len(layers) / 500),
    )


def stretto_plan(source: object, options: str) -> Result:
    return CliRunner().invoke(app, ["plan", str(source), *shlex.split(options)])


def test_the_verdict_comes_first_and_the_next_step_last(net: Path, measured: None) -> None:
    done = stretto_plan(net, "--devices 4 --optimizer adamw")
    assert done.exit_code == 0, done.stderr
    assert done.stderr == "Measuring the layers ...\n"
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "DSP(0,0,0,0; 3,2,1,0) on 4 devices: predicted 3.00x one device, 3.00x split backpropagation",
        "Why this m: the smallest m that keeps the devices busy.",
        "The quickest without staleness: GPipe (8 micro-batches), 2.91x one device.",
    ]
    rows = [" ".join(line.split()) for line in lines]
    assert "0 0 to 1 (2) 84 2.00 ms 4.00 ms 100 %" in rows
    assert "3 6 to 7 (2) 84 2.00 ms 4.00 ms 75.0 %" in rows
    assert "split backpropagation DSP(0,0,0,0; 0,0,0,0) 24.0 ms 1.00x 2.08 KiB 2+2+2+2 exact" in rows
    assert "GPipe 8 micro-batches 8.25 ms 2.91x 2.08 KiB 2+2+2+2 exact" in rows
    assert any(line.startswith("device 3, m=0 .........F0-B0----F1-B1----") for line in lines)
    assert lines[-14:] == [
        "    import torch",
        "    import torch.distributed as dist",
        "    from net import model",
        "    from stretto.pipelining import ScheduleDSP, partition",
        "",
        "    dist.init_process_group()",
        "    torch.manual_seed(0)  # the same model everywhere",
        "    rank = dist.get_rank()",
        "    block = partition(model(), 4, by=(2, 2, 2, 2))[rank]",
        "    optimizer = torch.optim.AdamW(block.parameters(), lr=0.001)",
        '    with ScheduleDSP((block, rank, 4), optimizer, loss_fn, m="DSP(0,0,0,0; 3,2,1,0)") as schedule:',
        "        for x, y in schedule.feed(loader):",
        "            schedule.step(x, target=y)",
        "        schedule.flush()",
    ]


def test_slow_links_ask_for_longer_queues(net: Path, measured: None) -> None:
    done = stretto_plan(net, "--devices 4 --hop-ms 4 --json -")
    plan = json.loads(done.stdout)
    assert plan["specification"] == "DSP(1,1,1,0; 6,4,2,0)"
    assert plan["why"] == "the smallest m that keeps the devices busy with hops of 4 ms"
    assert plan["speedup_over_split"] == pytest.approx((24 + 6 * 4) / 8)


def test_two_devices_are_told_that_gpipe_is_as_good(net: Path, measured: None) -> None:
    done = stretto_plan(net, "--devices 2")
    assert done.stdout.startswith("DSP(0,0; 1,0) on 2 devices: predicted 1.60x one device")
    assert "It is as quick or quicker, and trains as one device does" in done.stdout
    assert "GPipe (8 micro-batches), 1.78x one device" in done.stdout


def test_a_staleness_can_be_given(net: Path, measured: None) -> None:
    plan = json.loads(stretto_plan(net, "--devices 2 --m 'DSP(0,0; 2,0; stashed)' --json -").stdout)
    assert (plan["specification"], plan["why"]) == ("DSP(0,0; 2,0; stashed)", "as given")
    assert [block["memory"]["copies_bytes"] for block in plan["blocks"]] == [3 * 4 * 4 * 42, 0]
    assert json.loads(stretto_plan(net, "--devices 2 --m 4,0 --json -").stdout)["staleness"]["m"] == [4, 0]


def test_no_staleness_is_chosen_where_a_recompute_costs_more_than_it_gains(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "measure_layers", lambda layers, sample: BlockTimes((9, 0.1), (18, 0.1)))
    done = stretto_plan(f"{net}:listed", "--devices 2")
    assert done.stdout.startswith("Nothing to gain from staleness on 2 devices.")
    assert "one block has nearly all the work" in done.stdout
    assert done.stdout.rstrip().endswith("Next: split the largest layer into several, or train on fewer devices.")


def test_one_device_gains_nothing(net: Path, measured: None) -> None:
    plan = json.loads(stretto_plan(net, "--devices 1 --json -").stdout)
    assert plan["verdict"] == "Nothing to gain from staleness on 1 device."
    assert plan["why"] == "one device waits for no other"
    assert plan["chosen"]["speedup"] == 1


def test_the_layers_are_measured_and_the_files_are_written(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_ENOUGH_S", 0)
    picture, record = tmp_path / "plan.svg", tmp_path / "plan.json"
    done = stretto_plan(net, f"--devices 3 --by parameters --json {record} --svg {picture}")
    assert done.exit_code == 0, done.stderr
    plan = json.loads(record.read_text())
    assert done.stdout.splitlines()[0] == plan["verdict"]
    assert [block["num_layers"] for block in plan["blocks"]] == [3, 3, 2]
    assert sum(block["num_parameters"] for block in plan["blocks"]) == 8 * 42
    assert min(plan["times"]["backward_s"]) > 0
    assert ElementTree.fromstring(picture.read_text()).get("viewBox")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("", "--devices 9", "9 blocks of a model with 8 layers"),
        (":absent", "--devices 2", "net.py defines no absent: expected an nn.Sequential"),
        (":broken", "--devices 2", "broken() of .*net.py fails: ZeroDivisionError"),
        (":tied", "--devices 2", "parameter '1.weight' of block 1 is '0.weight' of block 0"),
        (":branches", "--devices 1", "the model is Bilinear"),
        ("", "--devices 2 --m 1,2,0", "m=(1, 2, 0) has 3 values, the model has 2 blocks"),
        ("", "--devices 2 --m one", '--m one: expected numbers such as "3,2,1,0"'),
        ("", "--devices 2 --optimizer lion", "--optimizer lion: expected sgd, momentum"),
        ("", "--devices 2 --json absent/plan.json", "absent"),
    ],
)
def test_what_cannot_be_planned_is_refused(net: Path, name: str, options: str, says: str) -> None:
    done = stretto_plan(f"{net}{name}", options)
    assert done.exit_code == 2
    message = "".join(done.stderr.split("stretto plan: ")[1].split())  # lines break anywhere
    for part in says.split(".*"):
        assert "".join(part.split()) in message
    assert done.stdout == ""


def test_files_that_are_missing_fail_or_lack_a_sample_are_named(tmp_path: Path, net: Path) -> None:
    (tmp_path / "fails.py").write_text("import no_such_package_here")
    (tmp_path / "bare.py").write_text("model = []")
    for file, says in (
        ("absent.py", "there is no such file"),
        ("fails.py", "fails: ModuleNotFoundError: No module named 'no_such_package_here'"),
        ("bare.py", "defines no sample: expected a batch for the model"),
    ):
        done = stretto_plan(tmp_path / file, "--devices 2")
        assert done.exit_code == 2
        assert says in done.stderr
