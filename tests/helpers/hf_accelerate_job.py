"""A user's script with accelerate alone, whose scheduler is one of torch's. Prints the learning rates of its steps."""

import sys

import torch

import fairseq_async.deepspeed_plugin as deepspeed_async

deepspeed_async.attach()

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DeepSpeedPlugin  # noqa: E402


def main(run_dir: str) -> None:
    section = {"method": "local_sgd", "local_steps": 2, "run_dir": run_dir}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 0},  # accelerate asks for the key
        "async_training": section,
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 4)), batch_size=4)
    engine, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = []
    for (inputs,) in loader:
        rates.append(optimizer.param_groups[0]["lr"])
        accelerator.backward(engine(inputs).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    engine.end()
    print("rates:", *rates)


if __name__ == "__main__":
    main(sys.argv[1])
