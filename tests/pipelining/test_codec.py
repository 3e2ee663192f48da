import pytest
import torch

from stretto.pipelining.codec import decode, encode, pass_on

X = torch.randn(2, 3, 4, 5)
TENSORS = {
    "contiguous": X,
    "channels_last": X.to(memory_format=torch.channels_last),
    "transposed": X.transpose(0, 3),
    "one element": torch.tensor(3.5),
    "empty": X[:, :0],
    "a dimension of one": X[:1].transpose(0, 1),
    "complex": torch.complex(X, X),
    "bool": X > 0,
    "bfloat16": X.bfloat16(),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_dense_tensor_arrives_as_it_left_in_memory_of_its_own(tensor: torch.Tensor) -> None:
    found = pass_on({"a": tensor})["a"]
    assert torch.equal(found, tensor)
    assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
    assert tensor.numel() == 0 or found.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor", [X[:, ::2], X[..., 0], X[:1].expand(3, 3, 4, 5), torch.complex(X, X).conj(), X[1:]]
)
def test_any_other_arrives_with_the_same_values(tensor: torch.Tensor) -> None:
    assert torch.equal(pass_on(tensor), tensor)


def test_what_is_dense_travels_without_a_copy_but_for_what_updates_change() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    for held, is_copied in (([], False), ([weight], True)):
        _, flat = encode([weight.view(12)[4:], weight.t()], held)
        assert [not weight.data_ptr() <= one.data_ptr() < weight.data_ptr() + 48 for one in flat] == [is_copied] * 2


def test_what_needs_a_gradient_says_so_and_everything_else_travels_in_the_description() -> None:
    tree = {"a": [torch.ones(2, requires_grad=True), None], "b": (3, "text", torch.ones(2))}
    description, flat = encode(tree)
    assert [shape.requires_grad for shape in description.shapes] == [True, False]
    found = decode(description, flat)
    assert (found["a"][1], found["b"][:2]) == (None, (3, "text"))
    assert [found["a"][0].requires_grad, found["b"][2].requires_grad] == [True, False]


def test_a_sparse_tensor_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"the tensor at \['a'\]\[0\] of what passes between two blocks"):
        encode({"a": [X.to_sparse()]})
