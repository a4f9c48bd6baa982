import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trimtab.formats import fake_quantize, get, per_block, per_tile, per_token
from trimtab.precision import scaled_products
from trimtab.precision.scaled_products import attempt, multiplies_fp8, scaled_product, why_emulated

E4M3, E5M2 = get("e4m3"), get("e5m2")
GPU = torch.device("cuda") if torch.cuda.is_available() else None
needs_fp8 = pytest.mark.skipif(GPU is None or not multiplies_fp8(GPU), reason="needs a GPU with FP8 products")


def emulated(a, b, a_grid, scaling):
    rows, blocks = (per_tile(), per_block()) if scaling == "tile" else (per_token(), per_token())
    return fake_quantize(a.float(), a_grid, rows) @ fake_quantize(b.float(), E4M3, blocks).t()


def test_a_product_by_token_is_the_emulated_one_rounded_to_bfloat16():
    # torch computes this kind of product on a CPU too, as a reference of its own.
    torch.manual_seed(0)
    a, b = torch.randn(5, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    torch.testing.assert_close(
        scaled_product(a, b, "token", E4M3, E4M3).float(), emulated(a, b, E4M3, "token"), rtol=2.0**-8, atol=1e-3
    )


def test_a_token_that_is_not_finite_stays_visible():
    a, b = torch.randn(5, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    a[2, 3] = torch.inf
    y = scaled_product(a, b, "token", E4M3, E4M3)
    assert bool(y[2].isnan().all())
    assert bool(y[[0, 1, 3, 4]].isfinite().all())


def test_a_cpu_emulates_and_says_why():
    a = torch.randn(4, 128).bfloat16()
    assert why_emulated(a, a, "tile", E4M3, E4M3) == "the device has no FP8 products"


@pytest.mark.parametrize(
    ("m", "k", "n", "scaling", "reason"),
    [
        (4, 100, 128, "tile", "multiples of 128"),
        (4, 128, 100, "tile", "multiples of 128"),
        (3, 128, 128, "tile", "multiples of 4"),
        (4, 24, 16, "token", "multiples of 16"),
        (0, 128, 128, "tile", "no tokens"),
    ],
)
def test_sizes_that_the_device_does_not_take_are_emulated_and_named(monkeypatch, m, k, n, scaling, reason):
    monkeypatch.setattr(scaled_products, "multiplies_fp8", lambda device: True)
    a, b = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16)
    assert reason in why_emulated(a, b, scaling, E4M3, E4M3)


def test_a_device_that_refuses_or_differs_is_not_trusted(monkeypatch):
    monkeypatch.setattr(scaled_products, "multiplies_fp8", lambda device: True)
    a = torch.zeros(128, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(scaled_products, "_verdicts", {})
    # A CPU refuses scales in tiles.
    assert why_emulated(a, a, "tile", E4M3, E4M3).startswith("the device refuses")
    monkeypatch.setattr(scaled_products, "_verdicts", {})
    monkeypatch.setattr(scaled_products, "scaled_product", lambda a, b, *rest: emulated(a, b, E4M3, "token") * 1.02)
    assert why_emulated(a, a, "token", E4M3, E4M3).startswith("the device's product differs by")
    monkeypatch.setattr(scaled_products, "_verdicts", {})
    monkeypatch.setattr(scaled_products, "scaled_product", lambda a, b, *rest: emulated(a, b, E4M3, "token"))
    assert why_emulated(a, a, "token", E4M3, E4M3) is None


def test_what_is_refused_for_its_sizes_is_emulated_and_asked_for_no_more(monkeypatch):
    asked = []

    def refuses_one_size(a, b, *rest):
        asked.append(tuple(a.shape))
        if a.shape[0] == 48:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nand a stack")
        return emulated(a, b, E4M3, "token")

    monkeypatch.setattr(scaled_products, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(scaled_products, "_verdicts", {})
    monkeypatch.setattr(scaled_products, "_refused", {})
    monkeypatch.setattr(scaled_products, "scaled_product", refuses_one_size)
    a, b = torch.ones(48, 128).bfloat16(), torch.ones(128, 128).bfloat16()
    for _ in range(2):
        assert attempt(a, b, "token", E4M3, E4M3, "float32") == (
            None,
            "the device refuses: CUBLAS_STATUS_NOT_SUPPORTED",
        )
    assert asked.count((48, 128)) == 1
    assert attempt(a[:32], b, "token", E4M3, E4M3, "float32")[1] is None


def test_a_device_that_refuses_many_numbers_of_tokens_is_asked_no_more_for_others(monkeypatch):
    asked = []

    def refuses(a, b, *rest):
        if a.shape[0] != 256:  # what the trial has
            asked.append(a.shape[0])
            raise RuntimeError("not today")
        return emulated(a, b, E4M3, "token")

    monkeypatch.setattr(scaled_products, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(scaled_products, "_verdicts", {})
    monkeypatch.setattr(scaled_products, "_refused", {})
    monkeypatch.setattr(scaled_products, "scaled_product", refuses)
    b = torch.ones(128, 128).bfloat16()
    for tokens in range(16, 116):
        found = attempt(torch.ones(tokens, 128).bfloat16(), b, "token", E4M3, E4M3, "float32")
        assert found == (None, "the device refuses: not today")
    assert len(asked) == 8
    assert sum(map(len, scaled_products._refused.values())) == 8


def test_a_device_that_is_out_of_memory_is_no_device_that_refuses(monkeypatch):
    def full(a, b, *rest):
        if a.shape[0] == 48:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return emulated(a, b, E4M3, "token")

    monkeypatch.setattr(scaled_products, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(scaled_products, "_verdicts", {})
    monkeypatch.setattr(scaled_products, "scaled_product", full)
    a = torch.ones(48, 128).bfloat16()
    with pytest.raises(torch.OutOfMemoryError):
        attempt(a, a[:16], "token", E4M3, E4M3, "float32")


@pytest.mark.parametrize("a_grid", [E4M3, E5M2], ids=lambda grid: grid.name)
@pytest.mark.parametrize("scaling", ["tile", "token"])
@pytest.mark.parametrize("k", [128, 384, 512, 640, 2816, 4096])
def test_operands_and_scales_have_the_layouts_that_torch_asks_of_a_gpu(monkeypatch, k, scaling, a_grid):
    """By its own check of the call, which needs no GPU."""
    given = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *operands, **settings: given.append((operands, settings)))
    scaled_product(torch.randn(256, k).bfloat16(), torch.randn(384, k).bfloat16(), scaling, a_grid, E4M3)
    monkeypatch.undo()
    [(operands, settings)] = given

    def on_gpu(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    with FakeTensorMode():
        scales = {name: on_gpu(settings.pop(name)) for name in ("scale_a", "scale_b")}
        assert torch._scaled_mm(*map(on_gpu, operands), **scales, **settings).shape == (256, 384)
    assert settings["out_dtype"] is torch.bfloat16
    if scaling == "tile" and k > 128:
        # What torch checks on the device itself: the outer scales by columns, the others by rows of whole fours.
        assert scales["scale_a"].stride() == (1, 256)
        assert scales["scale_b"].stride() == (1, -(-k // 512) * 4)


@pytest.mark.gpu
@needs_fp8
@pytest.mark.parametrize("scaling", ["tile", "token"])
@pytest.mark.parametrize("k", [512, 640])
def test_a_gpu_multiplies_as_the_emulation_does(scaling, k):
    a = torch.randn(64, k, device=GPU).bfloat16()
    b = torch.randn(256, k, device=GPU).bfloat16()
    reason = why_emulated(a, b, scaling, E4M3, E4M3)
    if reason is not None:
        # Tiles are multiplied by Hopper alone; scales that must be padded, by some versions of torch.
        assert scaling == "tile", reason
        assert k == 640 or torch.cuda.get_device_capability(GPU) != (9, 0), reason
        pytest.skip(reason)
    expected = emulated(a, b, E4M3, scaling)
    assert (scaled_product(a, b, scaling, E4M3, E4M3).float() - expected).abs().amax() < 2.0**-7 * expected.abs().amax()
