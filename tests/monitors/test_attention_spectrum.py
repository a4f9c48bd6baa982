"""What AttentionSpectrum reports of training. This file is also the script that each of two ranks runs."""

from __future__ import annotations

import copy
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import ConfigError, TrimtabWarning
from trimtab.monitors.attention_spectrum import AttentionSpectrum
from trimtab.monitors.layouts import HeadLayout, find_head_layouts
from trimtab.monitors.protocol import MonitorContext
from trimtab.monitors.spectrum import effective_rank, frobenius_norm, qk_increment, spectral_entropy, stable_rank

WIDTH, HEADS, KV_HEADS, D_HEAD = 32, 4, 2, 8
MATRICES = ("d1", "d2", "d3", "dwq", "dwk")


class Attention(nn.Module):
    """Attention with shared key heads."""

    def __init__(self, num_heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, KV_HEADS, D_HEAD
        self.q_proj = nn.Linear(WIDTH, num_heads * D_HEAD)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * D_HEAD)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * D_HEAD)
        self.o_proj = nn.Linear(num_heads * D_HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, D_HEAD)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, *num_heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Attention(n)}) for n in num_heads)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["attn"](x)
        return x


def build(*num_heads: int) -> Net:
    torch.manual_seed(0)
    return Net(*(num_heads or (HEADS, HEADS, HEADS)))


def batch(step: int) -> Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module, monitor: AttentionSpectrum | None, steps: range, optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, Tensor]]:
    """What the monitor observes at each step, before the update of that step."""
    seen = {}
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        if monitor is not None:
            seen[step] = monitor.observe(step)
        optimizer.step()
    return seen


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def started(model: nn.Module, **settings: Any) -> AttentionSpectrum:
    monitor = AttentionSpectrum(**settings)
    monitor.start(model)
    return monitor


def nudge(model: nn.Module, scale: float = 1e-3) -> None:
    """An update of every weight."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((scale * torch.randn(p.shape, generator=generator)).to(p.dtype))


def heads_of(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return [tuple(w.clone() for w in layout.query_key()) for layout in find_head_layouts(model).known]


@pytest.mark.parametrize("num_heads", [(HEADS, HEADS, HEADS), (HEADS, 2 * HEADS)])
@pytest.mark.parametrize("snapshots_on", ["device", "cpu"])
def test_the_values_are_those_of_each_head_taken_alone(num_heads, snapshots_on):
    model = build(*num_heads)
    monitor = started(model, every_steps=1, snapshots_on=snapshots_on)
    assert monitor.observe(1) == {}
    old = heads_of(model)
    nudge(model)
    values = monitor.observe(2)
    measures = {
        "entropy": spectral_entropy,
        "norm": frobenius_norm,
        "stable_rank": stable_rank,
        "effective_rank": effective_rank,
    }
    at = 0
    for (wq, wk), (new_wq, new_wk) in zip(old, heads_of(model), strict=True):
        for h in range(len(wq)):
            shared = h // (len(wq) // len(wk))
            spectra = qk_increment(wq[h], wk[shared], new_wq[h], new_wk[shared])
            for name, spectrum in spectra.items():
                for metric, measure in measures.items():
                    got = values[f"{name}_{metric}"].flatten()[at]
                    torch.testing.assert_close(got, measure(spectrum), rtol=1e-4, atol=1e-6)
            at += 1
    assert set(values) == {f"{n}_{m}" for n in MATRICES for m in measures} | {"dwq_layer_entropy", "dwk_layer_entropy"}
    is_even = len(set(num_heads)) == 1
    assert values["d2_entropy"].shape == ((len(num_heads), HEADS) if is_even else (sum(num_heads),))


def test_every_value_has_a_name_for_each_of_its_places():
    model = build(HEADS, 2 * HEADS)
    monitor = started(model, every_steps=1)
    monitor.observe(1)
    nudge(model)
    for metric, value in monitor.observe(2).items():
        assert len(monitor.places(metric)) == value.numel()
    assert monitor.places("d2_entropy")[:5] == [f"layer_0/head_{h}" for h in range(4)] + ["layer_1/head_0"]
    assert monitor.places("dwq_layer_entropy") == ["layer_0", "layer_1"]


def test_a_layers_value_is_the_mean_over_its_heads():
    model = build()
    monitor = started(model, every_steps=1)
    monitor.observe(1)
    nudge(model)
    values = monitor.observe(2)
    for name in ("dwq", "dwk"):
        torch.testing.assert_close(values[f"{name}_layer_entropy"], values[f"{name}_entropy"].mean(1))


def test_a_window_is_of_exactly_so_many_updates():
    model = build()
    optimizer = adam(model)
    monitor = started(model, every_steps=3)
    before: dict[int, list[tuple[Tensor, Tensor]]] = {}
    seen = {}
    for step in range(1, 9):
        before[step] = heads_of(model)
        seen |= train(model, monitor, range(step, step + 1), optimizer)
    assert [step for step, values in seen.items() if values] == [4, 7]
    for end in (4, 7):
        wq, wk = before[end - 3][1]
        new_wq, new_wk = before[end][1]
        spectrum = qk_increment(wq[3], wk[1], new_wq[3], new_wk[1])["d2"]
        torch.testing.assert_close(seen[end]["d2_entropy"][1, 3], spectral_entropy(spectrum), rtol=0, atol=1e-6)


def test_training_is_bit_for_bit_what_it_is_without_the_monitor():
    plain, watched = build(), build()
    monitor = started(watched, every_steps=2)
    torch.manual_seed(3)
    train(plain, None, range(1, 7), adam(plain))
    state = torch.random.get_rng_state()
    torch.manual_seed(3)
    train(watched, monitor, range(1, 7), adam(watched))
    assert torch.equal(state, torch.random.get_rng_state())
    for p, q in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p.grad, q.grad)


def test_neither_values_nor_snapshots_hold_a_graph_or_move_with_the_weights():
    model = build()
    monitor = started(model, every_steps=1)
    monitor.observe(1)
    snapshots = {name: w.clone() for name, w in monitor.tensor_state().items()}
    kept = monitor.tensor_state()
    nudge(model)
    assert all(torch.equal(kept[name], snapshots[name]) for name in kept)
    values = monitor.observe(2)
    assert not any(t.requires_grad for t in [*values.values(), *kept.values()])


def test_autocast_around_the_step_changes_nothing():
    models = build(), build()
    found = []
    for model, is_on in zip(models, (False, True), strict=True):
        monitor = started(model, every_steps=1)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            monitor.observe(1)
            nudge(model)
            found.append(monitor.observe(2))
    assert all(torch.equal(found[0][metric], found[1][metric]) for metric in found[0])


def test_a_run_that_is_saved_and_loaded_inside_a_window_goes_on_as_if_it_had_not_been():
    model = build()
    optimizer = adam(model)
    monitor = started(model, every_steps=4)
    train(model, monitor, range(1, 4), optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), monitor.state_dict(), monitor.tensor_state()))
    expected = train(model, monitor, range(4, 10), optimizer)

    model = build()
    optimizer = adam(model)
    monitor = started(model, every_steps=4)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    monitor.load_state_dict(saved[2])
    monitor.load_tensor_state(saved[3])
    got = train(model, monitor, range(4, 10), optimizer)
    assert [step for step, values in got.items() if values] == [5, 9]
    for step in (5, 9):
        assert all(torch.equal(got[step][metric], value) for metric, value in expected[step].items())


def test_without_its_tensors_a_resumed_run_begins_a_window_afresh():
    model = build()
    monitor = started(model, every_steps=2)
    train(model, monitor, range(1, 3), adam(model))
    monitor.load_state_dict(monitor.state_dict())
    assert monitor.tensor_state() == {}
    seen = train(model, monitor, range(3, 7), adam(model))
    assert [step for step, values in seen.items() if values] == [5]


def test_snapshots_of_other_layers_or_shapes_are_not_compared_with():
    other = started(build(HEADS), every_steps=2)
    other.observe(1)
    model = build()
    monitor = started(model, every_steps=2)
    monitor.load_state_dict(other.state_dict())
    monitor.load_tensor_state(other.tensor_state())
    assert monitor.observe(3) == {}
    wide = started(build(HEADS, HEADS, 2 * HEADS), every_steps=2)
    wide.observe(1)
    monitor.load_state_dict(wide.state_dict())
    monitor.load_tensor_state(wide.tensor_state())
    nudge(model)
    entropy = monitor.observe(3)["d2_entropy"]
    assert entropy[:2].isfinite().all()
    assert entropy[2].isnan().all()


def test_a_jump_to_another_step_begins_a_window_afresh():
    model = build()
    monitor = started(model, every_steps=3)
    monitor.observe(10)
    for step, has_values in ((2, False), (3, False), (5, True), (99, False), (102, True)):
        nudge(model)
        assert bool(monitor.observe(step)) == has_values


def test_frozen_layers_are_left_out_where_others_are_trained():
    model = build()
    model.layers[1].requires_grad_(False)
    assert started(model).places("dwq_layer_entropy") == ["layer_0", "layer_2"]
    assert started(model, layers=["layers.1"]).places("dwq_layer_entropy") == ["layer_1"]
    model.requires_grad_(False)
    assert len(started(model).places("dwq_layer_entropy")) == 3


def test_an_update_of_zero_and_weights_that_are_nan_have_defined_values():
    model = build()
    monitor = started(model, every_steps=1)
    monitor.observe(1)
    nudge(model.layers[0])
    with torch.no_grad():
        model.layers[2]["attn"].q_proj.weight[0, 0] = torch.nan
    values = monitor.observe(2)
    assert values["d2_entropy"][0].isfinite().all()
    assert (values["d2_norm"][1] == 0).all()
    assert values["d2_entropy"][1].isnan().all()
    assert values["d2_norm"][2, 0].isnan()
    assert (values["d2_norm"][2, 1:] == 0).all()
    assert values["dwq_layer_entropy"].isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (1, ["layer_0"]),
        (2, ["layer_0", "layer_4"]),
        (3, ["layer_0", "layer_2", "layer_4"]),
        (9, [f"layer_{i}" for i in range(5)]),
        (["layers.3.attn", "layers.1"], ["layer_1", "layer_3"]),
        (["module.layers.2.attn"], ["layer_2"]),
    ],
)
def test_layers_are_counted_or_named(layers, expected):
    assert started(build(*[HEADS] * 5), layers=layers).places("dwq_layer_entropy") == expected


def test_only_what_is_asked_for_is_reported():
    model = build()
    monitor = started(model, every_steps=1, metrics=["norm"])
    monitor.observe(1)
    nudge(model)
    assert set(monitor.observe(2)) == {f"{name}_norm" for name in MATRICES}
    assert not monitor.alarm_rules


def test_every_alarm_rule_is_of_a_metric_that_is_reported_and_says_a_sentence():
    model = build()
    monitor = started(model, every_steps=1)
    monitor.observe(1)
    nudge(model)
    values = monitor.observe(2)
    drops = {metric: rule.detector.drop for metric, rule in monitor.alarm_rules.items()}
    assert drops == {"d2_entropy": 0.50, "dwq_layer_entropy": 0.20, "dwk_layer_entropy": 0.20}
    for metric, rule in monitor.alarm_rules.items():
        assert metric in values
        assert rule.mechanism == monitor.mechanism == "attention"
        assert "from 0.90" in rule.said(metric, ["layer_0"], 0.5, 0.9)


def test_a_head_whose_updates_gather_in_one_direction_gives_the_alarm_and_no_other():
    model = build()
    monitor = started(model, every_steps=1)
    rule = monitor.alarm_rules["d2_entropy"]
    detectors = rule.detector.over(monitor.places("d2_entropy"))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 16):
        values = monitor.observe(step)
        if values:
            detectors.update(values["d2_entropy"].flatten().double().numpy())
        with torch.no_grad():
            for layer in model.layers:
                for projection in (layer["attn"].q_proj, layer["attn"].k_proj):
                    projection.weight.add_(1e-3 * torch.randn(projection.weight.shape, generator=generator))
            if step > 8:
                direction = torch.randn(D_HEAD, 1, generator=generator) @ torch.randn(1, WIDTH, generator=generator)
                model.layers[1]["attn"].q_proj.weight[D_HEAD : 2 * D_HEAD] += 0.3 * direction
    fired = [place for place, on in zip(detectors.places, detectors.on, strict=True) if on]
    assert fired == ["layer_1/head_1"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"every_steps": 0}, "every_steps=0"),
    ({"every_steps": True}, "every_steps=True"),
    ({"layers": 0}, "layers=0"),
    ({"layers": "layers.0"}, "layers='layers.0'"),
    ({"layers": []}, "layers="),
    ({"snapshots_on": "disk"}, "snapshots_on='disk'"),
    ({"metrics": ["entropie"]}, "metrics="),
    ({"metrics": []}, "metrics="),
    ({"master_weights": {}}, "master_weights="),
    ({"layouts": []}, "layouts="),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_a_setting_that_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        AttentionSpectrum(**settings)


def test_a_layer_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"nearest names are layers\.0\.attn"):
        started(build(), layers=["layers.0.atn"])


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)


def test_attention_that_is_not_known_is_said_once_by_name_and_reason():
    model = build()
    for i in (0, 2):
        model.layers[i]["attn"] = FusedAttention()
    said: list[str] = []
    monitor = AttentionSpectrum(every_steps=1)
    monitor.bind(MonitorContext(optimizers=list, say_once=said.append))
    monitor.start(model)
    assert len(said) == 1
    assert "2 of 3 attention layers" in said[0]
    assert "layers.0.attn, layers.2.attn (its class FusedAttention is not known)" in said[0]
    assert monitor.places("dwq_layer_entropy") == ["layer_1"]
    with pytest.raises(ConfigError, match="FusedAttention is not known"), pytest.warns(TrimtabWarning, match="2 of 3"):
        started(model, layers=["layers.2"])


def test_a_layout_of_ones_own_is_taken():
    attention = FusedAttention()

    def own(module: nn.Module, fqn: str) -> HeadLayout | None:
        if module is not attention:
            return None
        return HeadLayout(
            name=fqn,
            num_heads=4,
            num_kv_heads=4,
            read_query=lambda read: read(attention.qkv.weight)[:WIDTH].unflatten(0, (4, -1)).mT,
            read_key=lambda read: read(attention.qkv.weight)[WIDTH : 2 * WIDTH].unflatten(0, (4, -1)).mT,
            parameters=lambda: [attention.qkv.weight],
        )

    monitor = started(nn.ModuleDict({"mix": attention}), every_steps=1, layouts=own)
    assert monitor.places("dwq_layer_entropy") == ["mix"]
    monitor.observe(1)
    nudge(attention)
    assert monitor.observe(2)["d2_entropy"].shape == (1, 4)


def test_a_model_without_attention_is_said_so_and_has_no_values():
    with pytest.warns(TrimtabWarning, match="found no attention"):
        monitor = started(nn.Linear(4, 4), every_steps=1)
    assert [monitor.observe(step) for step in (1, 2, 3)] == [{}, {}, {}]


def test_a_stopped_monitor_holds_nothing():
    monitor = started(build(), every_steps=1)
    monitor.observe(1)
    monitor.stop()
    assert monitor.tensor_state() == {}
    assert monitor.observe(2) == {}


class WithMasters(torch.optim.SGD):
    """Keeps a float32 weight behind each parameter, where some library keeps it."""

    def __init__(self, model: nn.Module, place: str) -> None:
        super().__init__(model.parameters(), lr=1.0)
        self.masters = {p: p.detach().float() for p in model.parameters()}
        if place == "state":
            for p, master in self.masters.items():
                self.state[p]["master_param"] = master
        elif place == "groups":
            self.param_groups_master = [{"params": list(self.masters.values())}]
        elif place == "parameter":
            for p, master in self.masters.items():
                p.main_param = master

    def nudge(self) -> None:
        """An update much smaller than a step of 16 bits."""
        generator = torch.Generator().manual_seed(7)
        for p, master in self.masters.items():
            master.add_(1e-6 * torch.randn(p.shape, generator=generator))
            p.data.copy_(master)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", ["state", "groups", "parameter", "given"])
def test_narrow_weights_are_read_from_their_masters(place, dtype):
    model = build().to(dtype)
    optimizer = WithMasters(model, place)
    given = optimizer.masters.get if place == "given" else None
    monitor = AttentionSpectrum(every_steps=1, master_weights=given)
    monitor.bind(MonitorContext(optimizers=lambda: [optimizer], say_once=pytest.fail))
    monitor.start(model)
    reference = copy.deepcopy(model).float()
    exact = started(reference, every_steps=1)
    for step in (1, 2):
        with torch.no_grad():
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                q.copy_(optimizer.masters[p])
        got, expected = monitor.observe(step), exact.observe(step)
        optimizer.nudge()
    assert all(torch.equal(got[metric], expected[metric]) for metric in expected)


def test_narrow_weights_without_masters_are_said_once_and_still_reported():
    model = build().bfloat16()
    said: list[str] = []
    monitor = AttentionSpectrum(every_steps=1)
    monitor.bind(MonitorContext(optimizers=lambda: [adam(model)], say_once=said.append))
    monitor.start(model)
    for step in (1, 2, 3):
        values = monitor.observe(step)
        nudge(model)
    assert values["d2_entropy"].isfinite().all()
    assert len(set(said)) == 1
    assert "master_weights" in said[0]


def test_frozen_narrow_weights_are_exact():
    model = build().bfloat16().requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = started(model, every_steps=1)
        monitor.observe(1)
        assert (monitor.observe(2)["d2_norm"] == 0).all()


def test_where_masters_come_in_between_nothing_is_compared():
    model = build().bfloat16()
    optimizer = WithMasters(model, "none")
    monitor = AttentionSpectrum(every_steps=1)
    monitor.bind(MonitorContext(optimizers=lambda: [optimizer], say_once=pytest.fail))
    monitor.start(model)
    monitor.observe(1)
    for p, master in optimizer.masters.items():
        optimizer.state[p]["master_param"] = master
    optimizer.nudge()
    assert monitor.observe(2)["d2_norm"].isnan().all()
    optimizer.nudge()
    assert monitor.observe(3)["d2_norm"].isfinite().all()


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16), 3.0])
def test_a_master_that_does_not_fit_is_refused(wrong):
    monitor = started(build().bfloat16(), every_steps=1, master_weights=lambda p: wrong)
    with pytest.raises(ConfigError, match="master_weights="):
        monitor.observe(1)


# What follows is run by two ranks.


def shard(model: Net, kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    if kind == "fsdp":
        for layer in model.layers:
            fully_shard(layer["attn"], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return
    plan = {name: ColwiseParallel() for name in ("attn.q_proj", "attn.k_proj", "attn.v_proj")}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan | {"attn.o_proj": RowwiseParallel()})


def whole_and_sharded_agree() -> dict[str, bool]:
    """Of monitors that started before and after the model was sharded."""
    agree = {}
    for kind in ("fsdp", "tensor parallel"):
        model, whole = build(), build()
        early = started(model, every_steps=1)
        shard(model, kind)
        assert all(hasattr(layer["attn"].q_proj.weight, "placements") for layer in model.layers)
        for step in (1, 2):
            if step == 1:
                monitors = [started(whole, every_steps=1), early, started(model, every_steps=1)]
            expected, *values = [monitor.observe(step) for monitor in monitors]
            with torch.no_grad():
                for p in [*model.parameters(), *whole.parameters()]:
                    # The same for an element whether its tensor is whole or not.
                    p.mul_(1.001).add_(1e-4)
        assert expected
        agree[kind] = all(torch.equal(of_sharded[m], expected[m]) for of_sharded in values for m in expected)
    return agree


def run_rank(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.save(whole_and_sharded_agree(), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_weights_have_the_values_of_whole_ones(start_ranks: Callable[[str, int], Path]):
    folder = start_ranks(__file__, 2)
    for rank in range(2):
        assert torch.load(folder / f"rank{rank}.pt") == {"fsdp": True, "tensor parallel": True}


if __name__ == "__main__":
    try:
        run_rank(int(sys.argv[1]), Path(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        raise
