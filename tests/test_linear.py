"""Linear maps with packed weights say what others say."""

import pytest

torch = pytest.importorskip("torch")

from rgate_integrations.proxy import linear  # noqa: E402
from rgate_integrations.proxy.linear import Linear, PackedLinear, pack  # noqa: E402


def tensors(dtype, *shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


def test_there_are_few_sizes():
    assert linear._sizes(1) == (8,)
    assert linear._sizes(8) == (8,)
    assert linear._sizes(513) == (512, 8)
    assert linear._sizes(2_000) == (512, 512, 512, 256, 128, 80)
    assert len({size for n in range(1, 20_000) for size in linear._sizes(n)}) == 18


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 23), (3, 9), (7, 100), (0, 4)])
def test_products_are_cut_and_padded_without_a_trace(dtype, shape, packed):
    weight, bias, given = tensors(dtype, (48, 32), (48,), (*shape, 32))
    for added in (bias, None):
        exact = None if added is None else added.float()
        expected = torch.nn.functional.linear(given.float(), weight.float(), exact)
        found = (Linear.packed if packed else Linear)(weight, added)(given)
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        assert found.float() == pytest.approx(expected, abs=1e-4 if dtype is torch.float32 else 0.1)


@pytest.mark.skipif(not linear.can_halve(), reason="this build of torch or this CPU has no FBGEMM")
@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 23), (3, 9), (7, 100), (0, 4)])
def test_weights_in_float16_are_multiplied_in_float32(shape):
    weight, bias, given = tensors(torch.float32, (48, 32), (48,), (*shape, 32))
    for added in (bias, None):
        halved = Linear.packed(weight, added, halve=True)
        assert halved.halves is not None
        assert halved.weight.untyped_storage().nbytes() == 0
        found = halved(given)
        expected = torch.nn.functional.linear(given, weight.half().float(), added)
        assert (found.dtype, found.shape) == (torch.float32, expected.shape)
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.skipif(not linear.can_halve(), reason="this build of torch or this CPU has no FBGEMM")
def test_with_weights_in_float16_the_company_of_a_row_changes_not_one_bit():
    weight, bias, given = tensors(torch.float32, (48, 32), (48,), (300, 32))
    halved = Linear.packed(weight, bias, halve=True)
    for rows in (1, 2, 5, 6, 7, 14, 128):
        assert torch.equal(halved(given)[:rows], halved(given[:rows]))


def test_a_torch_that_multiplies_no_float16_keeps_all_digits(monkeypatch):
    def missing(states, halves):
        raise RuntimeError("no engine")

    monkeypatch.setattr(linear, "_product_of_halves", missing)
    linear.can_halve.cache_clear()
    assert not linear.can_halve()
    (weight,) = tensors(torch.float32, (48, 32))
    assert Linear.packed(weight, None, halve=True).halves is None
    monkeypatch.undo()
    linear.can_halve.cache_clear()


def test_a_weight_that_is_too_large_for_float16_keeps_its_digits():
    (weight,) = tensors(torch.float32, (48, 32))
    weight[3, 4] = 70_000.0
    assert Linear.packed(weight, None, halve=True).halves is None
    weight[3, 4] = float("nan")
    assert Linear.packed(weight, None, halve=True).halves is None


def test_only_float32_is_halved():
    (weight,) = tensors(torch.bfloat16, (48, 32))
    assert Linear.packed(weight, None, halve=True).halves is None


def test_the_company_of_a_row_changes_not_one_bit(dtype):
    weight, bias, given = tensors(dtype, (48, 32), (48,), (300, 32))
    packed = Linear.packed(weight, bias)
    assert torch.equal(packed(given)[:5], packed(given[:5]))


def test_a_torch_or_a_cpu_that_cannot_pack_leaves_weights_as_they_are(dtype, monkeypatch):
    (weight,) = tensors(dtype, (48, 32))
    for operators in (object(), torch.ops.aten):
        monkeypatch.setattr(linear, "_operators", lambda operators=operators: operators)
        linear._can_pack.cache_clear()
        assert Linear.packed(weight, None).weight is weight
    monkeypatch.undo()
    linear._can_pack.cache_clear()


def test_other_types_are_not_packed():
    (weight,) = tensors(torch.float64, (8, 8))
    assert Linear.packed(weight, None).weight is weight


def test_a_model_is_packed_in_place():
    class Derived(torch.nn.Linear):
        pass

    inner = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), Derived(6, 6))
    model = torch.nn.Sequential(inner, torch.nn.Linear(6, 4, bias=False))
    (given,) = tensors(torch.float32, (5, 8))
    expected = model(given).detach()
    pack(model)
    assert [type(each) for each in inner] == [PackedLinear, torch.nn.Tanh, Derived]
    assert type(model[1]) is PackedLinear
    assert model[1].weight.dtype is torch.float32
    with torch.inference_mode():
        assert model(given) == pytest.approx(expected, abs=1e-5)
