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
