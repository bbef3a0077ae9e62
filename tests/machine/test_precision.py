"""Number formats follow what the device does well, and say why."""

import pytest
import torch

from narrowboat.machine import precision

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(("gain", "expected"), [(5.6, torch.bfloat16), (1.1, torch.float32), (0.2, torch.float32)])
def test_a_cpu_gets_bfloat16_only_where_it_is_fast(gain: float, expected: torch.dtype, monkeypatch):
    monkeypatch.setattr(precision, "measure_bfloat16_gain", lambda: gain)
    chosen = precision.choose_precision("auto", CPU)
    assert chosen.base.dtype == chosen.compute.dtype == expected
    assert f"multiplies bfloat16 {gain} times as fast as float32" in chosen.base.reason


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), torch.bfloat16), ((8, 0), torch.bfloat16), ((7, 5), torch.float16)]
)
def test_a_card_gets_bfloat16_only_where_it_is_native(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some Card")
    chosen = precision.choose_precision("auto", CUDA)
    assert chosen.base.dtype == expected
    assert f"Some Card (compute capability {capability[0]}.{capability[1]})" in chosen.base.reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_wish_is_followed_without_measuring(dtype: str, monkeypatch):
    monkeypatch.setattr(precision, "measure_bfloat16_gain", pytest.fail)
    chosen = precision.choose_precision(dtype, CPU)
    assert precision.name_of(chosen.base.dtype) == dtype
    assert chosen.base.reason == "model.dtype asks for it"


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_adapters_and_loss_are_always_float32(dtype: str):
    chosen = precision.choose_precision(dtype, CPU)
    assert chosen.adapters.dtype == chosen.loss.dtype == torch.float32


def test_the_measurement_takes_milliseconds_and_agrees_with_itself():
    gains = [precision.measure_bfloat16_gain() for _ in range(3)]
    assert all(gain > 0 for gain in gains)
    assert len({gain >= precision.BF16_PAYS for gain in gains}) == 1


def test_every_role_is_a_line_for_people():
    lines = precision.choose_precision("bfloat16", CPU).lines()
    assert lines[0] == "base weights bfloat16: model.dtype asks for it"
    assert [line.split(":")[0] for line in lines[1:]] == [
        "adapters and their gradients float32", "products bfloat16", "loss float32",
        "sums over micro-batches and cards float32", "carried keys and values bfloat16",
    ]  # fmt: skip


def test_a_quantised_base_is_told_and_leaves_the_other_roles_alone():
    plain, packed = (precision.choose_precision("bfloat16", CPU, quantize) for quantize in ("none", "nf4"))
    assert packed.base.reason == "model.dtype asks for it; its linear layers are held in nf4, nothing in float32 beside"
    assert (packed.base.dtype, packed.compute, packed.adapters) == (plain.base.dtype, plain.compute, plain.adapters)
