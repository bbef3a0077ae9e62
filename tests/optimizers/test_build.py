"""Every optimizer of the table learns, keeps the bytes it says, and goes on from a checkpoint to the last bit."""

import copy
import io

import pytest
import torch

from narrowboat.errors import CheckpointError, MachineError, OptionError
from narrowboat.optimizers import driving
from narrowboat.optimizers.account import account, describe
from narrowboat.optimizers.buckets import HostStates
from narrowboat.optimizers.build import settle_states
from narrowboat.optimizers.table import KINDS
from narrowboat.options.schema import OptimizerOptions

from .problems import Problem

KINDS_OF_STATES = [(name, "device") for name in KINDS] + [("adamw", "rebuilt")]


@pytest.mark.parametrize(("name", "states"), KINDS_OF_STATES)
def test_it_learns(name: str, states: str):
    problem = Problem()
    before = problem.loss().item()
    assert problem.steps(problem.build(name=name, states=states), 20) < 0.95 * before


@pytest.mark.parametrize(("name", "states"), KINDS_OF_STATES)
def test_a_run_resumed_is_the_same_run(name: str, states: str):
    problem = Problem()
    optimizer = problem.build(name=name, states=states)
    problem.steps(optimizer, 12)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = problem.copy()
    resumed = other.build(name=name, states=states)
    driving.load_states(resumed, torch.load(file, weights_only=True))
    problem.steps(optimizer, 10)
    other.steps(resumed, 10)
    assert all(torch.equal(a, b) for a, b in zip(problem.bits(), other.bits(), strict=True))
    assert [str(share) for share in account(optimizer)] == [str(share) for share in account(resumed)]


@pytest.mark.parametrize("name", KINDS)
def test_no_optimizer_begins_with_steps_far_beyond_its_rate(name: str):
    problem = Problem()
    optimizer = problem.build(name=name)
    for _ in range(12):
        before = problem.bits()
        problem.steps(optimizer, 1, rate=1e-3)
        moved = [(a - b).square().mean().sqrt() for a, b in zip(problem.bits(), before, strict=True)]
        assert max(moved) < 3e-3


@pytest.mark.parametrize("name", KINDS)
def test_a_large_matrix_takes_the_bytes_of_the_table(name: str):
    weight = torch.nn.Parameter(torch.ones(64, 4096))
    problem = Problem()
    problem.weights = {"layer.lora_A.default.weight": weight}
    optimizer = problem.build(name=name)
    weight.grad = torch.ones_like(weight)
    driving.step(optimizer, lambda: setattr(weight, "grad", torch.ones_like(weight)))
    (share,) = account(optimizer)
    assert share.num_bytes / weight.numel() == pytest.approx(KINDS[name].state_bytes, rel=0.05, abs=0.03)


def test_the_account_tells_small_tensors_apart():
    problem = Problem()
    optimizer = problem.build(name="adamw8bit")
    problem.steps(optimizer, 1)
    small = 192 * 16 + 192  # below 4,096 weights
    assert describe(account(optimizer)) == (
        "optimizer states take 45.8 KiB: 8-bit 2.25 bytes a weight for 9,216; float32 8.00 bytes a weight for "
        f"{small:,}"
    )


def test_b_learns_faster_when_told_and_vectors_are_not_decayed():
    optimizer = Problem().build(b_rate=16, weight_decay=0.1)
    driving.set_rate(optimizer, 1e-3)
    rates = {
        tuple(p.shape): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert rates == {(16, 576): (1e-3, 0.1), (192, 16): (1.6e-2, 0.1), (192,): (1e-3, 0.0)}


def test_rates_reach_optimizers_that_hold_them_as_tensors():
    optimizer = Problem().build(name="adamw8bit", b_rate=4)
    driving.set_rate(optimizer, 1e-3)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([1e-3, 4e-3, 1e-3])


@pytest.mark.parametrize(
    ("saved", "ours", "problem"),
    [
        ({"name": "adamw8bit"}, {"name": "adamw"}, "holds states of adamw8bit, this run's optimizer is adamw"),
        ({"name": "adamw"}, {"name": "bnb_adamw8bit"}, "holds states of adamw, this run's optimizer is bnb_adamw8bit"),
        ({"name": "adamw", "states": "rebuilt"}, {"name": "adamw"}, "Resume with optimizer.name: adamw and optimizer"),
    ],
)
def test_r17_states_of_another_kind_are_refused(saved: dict, ours: dict, problem: str):
    first = Problem()
    optimizer = first.build(**saved)
    first.steps(optimizer, 1)
    with pytest.raises(CheckpointError, match=problem):
        driving.load_states(Problem().build(**ours), optimizer.state_dict())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "bnb_adamw8bit", "states": "paged"}, "optimizer.states: paged needs a CUDA card; on cpu states are"),
        ({"name": "adamw", "states": "host"}, "host changes nothing on a CPU"),
        ({"name": "adalomo"}, "optimizer.clip_norm: 1 is not used"),
        ({"name": "schedule_free"}, "optimizer.schedule: cosine is not used"),
    ],
)
def test_what_is_replaced_or_not_used_is_said_once(options: dict, said: str):
    told: list = []
    problem = Problem()
    problem.steps(problem.build(told.append, **options), 1)  # no warning of the library's either
    assert [said in notice.text for notice in told] == [True]


def test_r17_a_card_whose_driver_cannot_page_keeps_its_states_and_says_so(monkeypatch):
    monkeypatch.setattr("narrowboat.optimizers.build.can_page", lambda device: False)
    monkeypatch.setattr("narrowboat.optimizers.build.describe_device", lambda device: "GRID A100X-8C")
    told: list = []
    options = OptimizerOptions(name="bnb_adamw8bit", states="paged")
    assert settle_states(options, torch.device("cuda"), told.append).states == "device"
    assert [n.text for n in told] == [
        "optimizer.states: the driver of GRID A100X-8C cannot page; states stay on the card."
    ]
    monkeypatch.setattr("narrowboat.optimizers.build.can_page", lambda device: True)
    assert settle_states(options, torch.device("cuda"), pytest.fail).states == "paged"


def test_r17_paged_states_come_back_from_a_checkpoint():
    """What a checkpoint gives is put into pages again; without a card into plain buffers, with the same values."""
    problem = Problem()
    optimizer = problem.build(name="bnb_adamw", states="paged")
    problem.steps(optimizer, 3)
    other = problem.copy()
    resumed = other.build(name="bnb_adamw", states="paged")
    driving.load_states(resumed, optimizer.state_dict())
    driving._page_again(resumed)  # as on a card
    problem.steps(optimizer, 2)
    other.steps(resumed, 2)
    assert all(torch.equal(a, b) for a, b in zip(problem.bits(), other.bits(), strict=True))


@pytest.mark.parametrize(
    ("name", "states", "fitting"),
    [("adamw", "paged", "bnb_adamw, bnb_adamw8bit, bnb_lion, bnb_lion8bit"), ("lion", "rebuilt", "adamw")],
)
def test_states_that_cannot_rest_there_are_refused(name: str, states: str, fitting: str):
    with pytest.raises(OptionError, match=f"{states} does not go with optimizer.name: {name}; it goes with {fitting}"):
        Problem().build(name=name, states=states)


@pytest.mark.parametrize(
    ("name", "package", "group"),
    [
        ("adamw4bit", "torchao", "quant"),
        ("bnb_lion8bit", "bitsandbytes", "quant"),
        ("came", "pytorch_optimizer", "optim"),
    ],
)
def test_a_missing_library_names_its_group(name: str, package: str, group: str, monkeypatch):

    def without(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr("narrowboat.machine.extras.import_module", without)
    with pytest.raises(
        MachineError, match=rf"optimizer.name: {name} needs {package}, which is not installed.*\[{group}\]"
    ):
        Problem().build(name=name)


def test_schedule_free_shows_its_average_and_trains_on_to_the_bit():
    problem = Problem()
    optimizer = problem.build(name="schedule_free")
    problem.steps(optimizer, 10)
    before = problem.bits()
    with driving.averaged(optimizer):
        assert not any(torch.equal(a, b) for a, b in zip(before, problem.bits(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, problem.bits(), strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_who_remembers_something_of_a_weight_sees_that_it_moved(name: str):
    """DoRA's norms are remembered by the version of A and B; some libraries write past it."""
    problem = Problem()
    optimizer = problem.build(name=name)
    problem.gradients()
    before = [weight._version for weight in problem.weights.values()]
    driving.step(optimizer, problem.gradients)
    between = [weight._version for weight in problem.weights.values()]
    with driving.averaged(optimizer):
        inside = [weight._version for weight in problem.weights.values()]
    after = [weight._version for weight in problem.weights.values()]
    assert all(a < b for a, b in zip(before, between, strict=True))
    if name == "schedule_free":
        assert all(a < b < c for a, b, c in zip(between, inside, after, strict=True))


def test_every_name_of_the_schema_is_in_the_table():
    assert set(OptimizerOptions.model_fields["name"].annotation.__args__) == set(KINDS)


def test_states_move_between_device_and_host_from_one_session_to_the_next():
    problem = Problem()
    plain = problem.build(name="adamw")
    problem.steps(plain, 3)
    other = problem.copy()
    group = {"params": list(other.weights.values()), "weight_decay": 0.0, "kind": "adamw"}
    moved = HostStates([group], lambda part: torch.optim.AdamW(part, lr=1e-3), bucket_bytes=40_000)
    saved = plain.state_dict()
    joined = {"state": saved["state"], "param_groups": [{**saved["param_groups"][0], "params": [0, 1, 2]}]}
    driving.load_states(moved, copy.deepcopy(joined))
    problem.steps(plain, 3)
    other.steps(moved, 3)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(problem.bits(), other.bits(), strict=True))
