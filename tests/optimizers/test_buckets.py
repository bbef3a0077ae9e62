"""Many small optimizers are one: the same steps, the same checkpoint, and less on the device."""

import pytest
import torch

from narrowboat.optimizers import driving
from narrowboat.optimizers.buckets import Buckets, DuringBackward, HostStates
from narrowboat.optimizers.table import KINDS
from narrowboat.options.schema import OptimizerOptions
from narrowboat.owner.causes import cause
from narrowboat.owner.meter import Meter

from .problems import Problem


def groups_of(problem: Problem) -> list[dict]:
    a, b, magnitude = problem.weights.values()
    return [
        {"params": [a, b], "weight_decay": 0.1, "kind": "x", "rate": 1.0},
        {"params": [magnitude], "weight_decay": 0.0, "kind": "x", "rate": 2.0},
    ]


def maker(name: str):
    return lambda groups: KINDS[name].make(groups, KINDS[name].settings(OptimizerOptions(name=name)))


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "bnb_adamw8bit", "lion", "came"])
@pytest.mark.parametrize("bucket_bytes", [0, 40_000, 10**9])
def test_split_or_whole_is_the_same_run_and_the_same_checkpoint(name: str, bucket_bytes: int):
    whole, split = Problem(), Problem()
    one = maker(name)(groups_of(whole))
    many = HostStates(groups_of(split), maker(name), bucket_bytes)
    whole.steps(one, 3)
    split.steps(many, 3)
    one_again, many_again = maker(name)(groups_of(whole)), HostStates(groups_of(split), maker(name), bucket_bytes)
    driving.load_states(one_again, many.state_dict())  # each goes on with the other's states
    driving.load_states(many_again, one.state_dict())
    whole.steps(one_again, 3)
    split.steps(many_again, 3)
    assert all(torch.equal(a, b) for a, b in zip(whole.bits(), split.bits(), strict=True))


def test_states_of_other_parameters_are_refused():
    problem = Problem()
    saved = maker("adamw")(groups_of(problem)[:1]).state_dict()
    with pytest.raises(ValueError, match=r"saved groups of \[2\] parameters, expected \[2, 1\]"):
        Buckets(groups_of(problem), maker("adamw"), 0).load_state_dict(saved)


def test_states_on_the_host_visit_the_device_a_bucket_at_a_time():
    weights = [torch.nn.Parameter(torch.ones(64, 256)) for _ in range(8)]
    size = weights[0].numel() * 4
    optimizer = HostStates([{"params": weights}], lambda part: torch.optim.AdamW(part, lr=1e-3), bucket_bytes=size)
    optimizer.resting = lambda: cause("states", "host")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with Meter() as meter:
        for weight in weights:
            meter.watch(weight.data, "weights")
            meter.watch(weight.grad, "gradients")
        before = meter.live.device_bytes
        for _ in range(3):
            optimizer.step()
            meter.reset_peak()
        assert meter.live.host_bytes == 8 * 2 * size
        assert meter.live.device_bytes - before < 100  # the counters of steps
        optimizer.step()
        assert (
            2 * size <= meter.peak.device_bytes - before < 6 * size
        )  # a bucket's moments and what the step itself needs


def test_during_backward_no_gradient_is_kept_and_the_steps_are_the_same():
    kept, dropped = Problem(), Problem()
    plain = maker("adafactor")(groups_of(kept))
    during = DuringBackward(groups_of(dropped), maker("adafactor"))
    for _ in range(3):
        kept.gradients()
        norm = torch.nn.utils.get_total_norm([w.grad for w in kept.weights.values()])
        plain.step()
        for weight in dropped.weights.values():
            weight.grad = None
        loss = dropped.loss()
        with during.armed():
            loss.backward()
        assert all(weight.grad is None for weight in dropped.weights.values())
        assert during.norm() == pytest.approx(float(norm), rel=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(kept.bits(), dropped.bits(), strict=True))


def test_gradients_of_earlier_micro_batches_count_during_backward():
    kept, dropped = Problem(), Problem()
    plain = maker("adafactor")(groups_of(kept))
    during = DuringBackward(groups_of(dropped), maker("adafactor"))
    for problem in (kept, dropped):
        problem.loss().backward()
    kept.loss().backward()
    plain.step()
    loss = dropped.loss()
    with during.armed():
        loss.backward()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(kept.bits(), dropped.bits(), strict=True))
