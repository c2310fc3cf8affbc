"""LAMB in torch against its algorithm in double precision."""

import pytest
import torch

from fairseq_async.algorithms.lamb import Lamb


def test_it_takes_the_steps_of_the_papers_algorithm() -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.zeros(4))]
    optimizer = Lamb(parameters, lr=0.02, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    expected = [parameter.detach().double() for parameter in parameters]
    first, second = ([torch.zeros_like(tensor) for tensor in expected] for _ in range(2))
    for step in range(1, 6):
        optimizer.zero_grad()
        for index, (parameter, tensor) in enumerate(zip(parameters, expected, strict=True)):
            parameter.grad = torch.randn_like(parameter)
            gradient = parameter.grad.double()
            first[index] = 0.9 * first[index] + 0.1 * gradient
            second[index] = 0.95 * second[index] + 0.05 * gradient**2
            update = first[index] / (1 - 0.9**step) / ((second[index] / (1 - 0.95**step)) ** 0.5 + 1e-6) + 0.1 * tensor
            ratio = tensor.norm() / update.norm() if tensor.norm() > 0 else 1.0
            expected[index] = tensor - 0.02 * ratio * update
        optimizer.step()
    for parameter, tensor in zip(parameters, expected, strict=True):
        assert torch.allclose(parameter.double(), tensor, rtol=1e-5, atol=1e-7)


def test_a_step_does_not_grow_with_the_gradient() -> None:
    moved = []
    for factor in (1.0, 1000.0):
        parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        optimizer = Lamb([parameter], lr=0.1, eps=0.0)
        parameter.grad = torch.tensor([1.0, -2.0]) * factor
        optimizer.step()
        moved.append((parameter.detach() - torch.tensor([3.0, 4.0])).norm())
    assert moved[0] == pytest.approx(moved[1]) and moved[0] == pytest.approx(0.5)  # 0.1 of the length


def test_a_step_of_nothing_leaves_a_parameter_as_it_is() -> None:
    """As of a part of the model that the first batch does not use."""
    parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    parameter.grad = torch.zeros(2)
    Lamb([parameter], lr=0.1).step()
    assert parameter.tolist() == [3.0, 4.0]
