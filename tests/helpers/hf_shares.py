"""Scripts of the Trainer with two workers that accumulate, one case after the other: ``hf_shares.py OUT``.

Each worker is a process that is forked after all is imported. It leaves the samples and the losses of each of its
steps, its log, and the parameters that it came to, and in a log what it has printed.
"""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.modules["torchaudio"] = None  # type: ignore[assignment]  # transformers would import it; it may not fit this torch

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD  # noqa: E402
from torch.utils.data import Subset  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

import fairseq_async.deepspeed_plugin as deepspeed_async  # noqa: E402
from fairseq_async.environment import PLUGINS, SERVER, TOKEN, WORKER, WORKERS  # noqa: E402
from fairseq_async.options.addresses import free_port  # noqa: E402
from fairseq_async.pytorch.hf_trainer import AsyncCallback  # noqa: E402
from fairseq_async.worker.start.server_process import ServerProcess  # noqa: E402
from tests.helpers.commands import HELPERS  # noqa: E402
from tests.helpers.sines import BATCH, CLIP, RATE, SAVED_AT, EndlessSines, Net, NetOfMeans, NetOfTokens, Sines  # noqa: E402

AVERAGE, STEPS = 4, 6


class Case(NamedTuple):
    """A run: the shares that its server gives, its options, whether its loss is a mean of tokens, whether its data have
    no length, whether its script counts the micro-batches of a step itself, what it goes on from, to what norm it
    clips, whether its model does not read the number of a step's tokens, and its means are "summed" or "divided" by
    the number of micro-batches, the average number of these, whether its script divides the data itself, whether
    samples are shuffled, the number of processes that read them, whether the model has dropout, and the number of ranks
    of each worker."""

    deepspeed: bool = False
    given: str = "6,2"
    options: dict[str, Any] = {"barrier": True, "shares": "auto"}
    by_tokens: bool = False
    endless: bool = False
    counts_itself: bool = False
    goes_on: str = ""
    clips: float = 0.0
    average: int = AVERAGE
    divides: bool = False
    shuffles: bool = False
    readers: int = 0
    drops: bool = False
    means: str = ""
    ranks: int = 1


CASES = {
    "whole": Case(),
    "resumed": Case(goes_on="whole"),
    "ragged": Case(given="8,2", average=5),
    "ragged, tokens": Case(given="8,2", average=5, by_tokens=True),
    "ragged, equal shares": Case(given="5,5", average=5, shuffles=True, drops=True),
    "ragged, equal": Case(options={"barrier": True, "shares": "equal"}, average=5, shuffles=True, drops=True),
    "shuffled": Case(shuffles=True),
    "shuffled, read by processes": Case(shuffles=True, readers=1),
    "divided by the script": Case(divides=True),
    "divided by the script, resumed": Case(divides=True, goes_on="divided by the script"),
    "tokens": Case(by_tokens=True),
    "means, summed": Case(means="summed"),
    "means, divided": Case(means="divided"),
    "clipped": Case(clips=CLIP),
    "endless": Case(endless=True),
    "equal shares": Case(given="4,4"),
    "equal": Case(options={"barrier": True, "shares": "equal"}),
    "by default": Case(options={}),
    "counting": Case(options={}, counts_itself=True),
    "counting, auto": Case(counts_itself=True),
    "deepspeed": Case(deepspeed=True),
    "deepspeed, by default": Case(deepspeed=True, options={}),
    "deepspeed, counting": Case(deepspeed=True, options={}, counts_itself=True),
    "deepspeed, counting, auto": Case(deepspeed=True, counts_itself=True),
    "deepspeed, islands": Case(deepspeed=True, ranks=2),
    "deepspeed, resumed": Case(deepspeed=True, goes_on="deepspeed"),
    "deepspeed, tokens": Case(deepspeed=True, by_tokens=True),
}


class Counting(Trainer):
    """As many scripts have it."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) / self.args.gradient_accumulation_steps


class Steps(TrainerCallback):
    """Notes where a step ends."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.net.samples.append([])
        self.net.losses.append([])


def train(name: str, out: Path, worker: int) -> None:
    case = CASES[name]
    net = NetOfTokens() if case.by_tokens else NetOfMeans() if case.means else Net()
    if case.drops:
        net.insert(1, nn.Dropout(0.2))
    options = case.options | {"run_dir": str(out / name / "run")}
    before = str(out / case.goes_on / "trainer" / f"checkpoint-{SAVED_AT}") if case.goes_on else None
    given: dict[str, Any] = {"use_cpu": True}
    own: dict[str, Any] = {"callbacks": [Steps(net)]}
    if case.deepspeed:
        deepspeed_async.attach()
        optimizer = {"type": "SGD", "params": {"lr": RATE, "momentum": 0.9}}
        config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        ours = {"method": "hybrid_async", "island_size": case.ranks, **options}
        section = {"zero_optimization": {"stage": 0}, "async_training": ours}
        given = {"deepspeed": config | {"optimizer": optimizer, "gradient_clipping": case.clips} | section}
    else:
        own["callbacks"].append(AsyncCallback("hybrid_async", resume_from_checkpoint=before, **options))
        own["optimizers"] = SGD(net.parameters(), lr=RATE, momentum=0.9), None
    arguments = TrainingArguments(
        output_dir=str(out / name / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=case.average,
        train_sampling_strategy="random" if case.shuffles else "sequential",
        dataloader_num_workers=case.readers,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=case.clips,
        save_steps=SAVED_AT,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **given,
    )
    kind = Counting if case.counts_itself else Trainer
    data: Any = EndlessSines() if case.endless else Sines()
    if case.divides:
        (callback,) = (each for each in own["callbacks"] if isinstance(each, AsyncCallback))
        data = Subset(data, range(callback.worker, len(data), callback.workers))
    trainer = kind(net, arguments, train_dataset=data, **own)
    if case.means == "divided":
        trainer.loss_is_scaled_for_ga = False
    trainer.train(resume_from_checkpoint=before)
    assert type(trainer.args.gradient_accumulation_steps) is int
    left = {"samples": net.samples, "losses": net.losses, "log": trainer.state.log_history}
    torch.save(
        left | {"parameters": nn.utils.parameters_to_vector(net.parameters()).detach()}, out / f"{name}-{worker}.pt"
    )


def start(name: str, out: Path) -> ServerProcess | None:
    """Sets what a launcher would; returns the server that one of ours would have started."""
    os.environ |= {PLUGINS: str(HELPERS / "fixed_shares.py"), "SHARES": CASES[name].given}
    if CASES[name].deepspeed:
        ranks = str(2 * CASES[name].ranks)
        os.environ |= {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return None
    module, run = "fairseq_async.server.programs.gradient_main", out / name / "run"
    server = ServerProcess(module, 2, run, out / f"{name}.server.log", ends_with_workers=True)
    os.environ |= {SERVER: server.address, TOKEN: server.token, WORKERS: "2"}
    return server


def main() -> None:
    out = Path(sys.argv[1])
    for name, case in CASES.items():
        (out / name).mkdir()
        server, started = start(name, out), []
        for worker in range(2 * case.ranks):
            if (process := os.fork()) == 0:
                place = {"RANK": str(worker), "LOCAL_RANK": str(worker)} if case.deepspeed else {WORKER: str(worker)}
                os.environ |= place
                torch.set_num_threads(1)
                with (out / f"{name}.log").open("a") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                return train(name, out, worker)  # and ends, as a script would
            started.append(process)
        for process in started:
            os.waitpid(process, 0)  # the server, which ends with them, is a child of this process too
        if server is not None:
            server.stop()
            for each in (SERVER, TOKEN, WORKERS):
                del os.environ[each]


if __name__ == "__main__":
    main()
