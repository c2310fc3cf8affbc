"""``HybridAsync`` round a model in bf16."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from fairseq_async.pytorch import HybridAsync
from fairseq_async.server.programs import gradient_main
from tests.helpers.plain_loop import STEPS, flat, net
from tests.helpers.thread_workers import ThreadWorkers

Start = Callable[..., ThreadWorkers]


def backward(model: nn.Module, step: int) -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    nn.functional.mse_loss(model(inputs.bfloat16()).float(), inputs.sum(1, keepdim=True).sin()).backward()


def test_a_model_in_bf16_is_rounded_from_the_servers_fp32(workers: Start) -> None:
    """Steps of a thousandth of a parameter would be lost in bf16. After a validation the model is as before."""

    def train(worker: int) -> Tensor:
        model = net().bfloat16()
        optimizer = AdamW(model.parameters(), lr=1e-4)
        with HybridAsync(model, optimizer, total_steps=STEPS) as training:
            for step in range(STEPS):
                with training.server_parameters():
                    pass
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
        return flat(model)

    model, masters = net().bfloat16(), net()
    optimizer = AdamW(masters.parameters(), lr=1e-4)
    for own, master in zip(model.parameters(), masters.parameters(), strict=True):
        master.data.copy_(own)
    begun = flat(model)
    for step in range(STEPS):
        model.zero_grad()
        backward(model, step)
        for own, master in zip(model.parameters(), masters.parameters(), strict=True):
            assert own.grad is not None
            master.grad = own.grad.float()
        optimizer.step()
        for own, master in zip(model.parameters(), masters.parameters(), strict=True):
            own.data.copy_(master)
    (ended,) = workers(1, gradient_main.build).run(train)
    assert torch.equal(ended, flat(model)) and not torch.equal(ended, begun)
