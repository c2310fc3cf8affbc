"""Trains the demo's model with others' local SGD and with ours; one of two workers takes four times as long.

``python scripts/bench/beside_others.py`` runs each by torchrun for the same seconds, and prints the batches of both
workers and the loss on text that neither has seen. A batch takes 0.05 s, on the slow worker 0.2 s, by sleeping, so that
other load on the machine matters little. It leaves out those that are not installed:
``pip install accelerate torchft hivemind``.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, distributed

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fairseq_async.cli.demo_training import BATCH, CONTEXT, CharacterModel  # noqa: E402
from fairseq_async.options.addresses import free_port  # noqa: E402

LOCAL_STEPS, SECONDS_PER_BATCH, LR = 10, (0.05, 0.2), 3e-3
Result = tuple[int, int, float]
"""A worker's rank, its batches, and the loss of its last parameters."""


def texts() -> tuple[Tensor, Tensor]:
    """Returns the bytes to train on, and those of the last tenth."""
    files = sorted((ROOT / "fairseq_async").rglob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    border = len(data) * 9 // 10
    return data[:border], data[border:]


def draw(data: Tensor, random: torch.Generator, count: int = BATCH) -> Tensor:
    return data[torch.randint(len(data) - CONTEXT, (count, 1), generator=random) + torch.arange(CONTEXT + 1)]


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, more: Callable[[int, float], bool]
) -> int:
    """Trains while ``more`` of (batches so far, seconds so far) is true; returns the number of batches."""
    data, random, batches = texts()[0], torch.Generator().manual_seed(rank), 0
    begin = time.monotonic()
    while more(batches, time.monotonic() - begin):
        until = time.monotonic() + SECONDS_PER_BATCH[rank]
        optimizer.zero_grad()
        model(draw(data, random)).backward()
        time.sleep(max(0.0, until - time.monotonic()))  # a batch takes as long as this worker's are to take
        optimizer.step()
        batches += 1
    return batches


def held_out_loss(model: torch.nn.Module) -> float:
    """Returns the loss in nats a byte on the text that no worker has seen."""
    with torch.no_grad():
        return float(model(draw(texts()[1], torch.Generator().manual_seed(9), 512)))


def new_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = CharacterModel()
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def all_agree(batches: int, go_on: bool) -> bool:
    """After each averaging, whether all workers go on: one that stopped alone would leave the others waiting."""
    if batches == 0 or batches % LOCAL_STEPS:
        return True
    votes = torch.tensor(float(go_on))
    distributed.all_reduce(votes, distributed.ReduceOp.MIN)
    return bool(votes)


def accelerate_worker(seconds: float) -> Result:
    from accelerate import Accelerator  # only this side needs it
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*new_model())
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=LOCAL_STEPS) as local:

        def more(batches: int, spent: float) -> bool:
            if batches:
                local.step()
            return all_agree(batches, spent < seconds)

        batches = train(model, optimizer, accelerator.process_index, more)
    return accelerator.process_index, batches, held_out_loss(accelerator.unwrap_model(model))


def torchft_worker(seconds: float) -> Result:
    """Each worker is a replica group of one rank; rank 0 has the lighthouse, where the groups find each other."""
    from torchft import Manager, ProcessGroupGloo  # only this side needs it
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import LocalSGD

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2) if rank == 0 else None
    address = [lighthouse.address() if lighthouse else None]
    distributed.broadcast_object_list(address)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model, optimizer = new_model()
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,  # as its LocalSGD wants
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"worker_{rank}",
        hostname="127.0.0.1",
    )
    with LocalSGD(manager, model, optimizer, sync_every=LOCAL_STEPS):
        batches = train(model, optimizer, rank, lambda batches, spent: all_agree(batches, spent < seconds))
    distributed.barrier()  # the lighthouse stays until both are done
    loss = held_out_loss(model)
    manager.shutdown(wait=False)
    return rank, batches, loss


def hivemind_worker(seconds: float) -> Result:
    """Each worker is a peer that steps by itself; they average after as many samples as two workers' local steps."""
    import hivemind  # only this side needs it

    distributed.init_process_group("gloo")
    rank, here = distributed.get_rank(), ["/ip4/127.0.0.1/tcp/0"]
    first = hivemind.DHT(host_maddrs=here, start=True) if rank == 0 else None
    addresses = [[str(each) for each in first.get_visible_maddrs()] if first else []]
    distributed.broadcast_object_list(addresses)
    dht = first or hivemind.DHT(host_maddrs=here, initial_peers=addresses[0], start=True)
    model, inner = new_model()
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="demo",
        optimizer=inner,
        batch_size_per_step=BATCH,
        target_batch_size=2 * LOCAL_STEPS * BATCH,
        use_local_updates=True,  # nobody waits for another's gradients
        matchmaking_time=5.0,  # "3-5s for small local runs", its documentation says; it warns of 3
    )
    distributed.barrier()
    batches = train(model, optimizer, rank, lambda _, spent: spent < seconds)
    loss = held_out_loss(model)
    distributed.barrier()
    optimizer.shutdown()
    dht.shutdown()
    return rank, batches, loss


def our_worker(seconds: float) -> Result:
    from fairseq_async.torch import AsyncLocalSGD

    model, optimizer = new_model()
    with AsyncLocalSGD(model, optimizer, local_steps=LOCAL_STEPS, run_dir="async") as worker:
        batches = train(model, optimizer, worker.worker, lambda _, spent: spent < seconds)
    return worker.worker, batches, held_out_loss(model)


WORKERS = {
    "accelerate": accelerate_worker,
    "torchft": torchft_worker,
    "hivemind": hivemind_worker,
    "fairseq_async": our_worker,
}
"""What a worker of each does; the names are those of the packages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--worker", choices=WORKERS)
    given = parser.parse_args()
    if given.worker:
        rank, batches, loss = WORKERS[given.worker](given.seconds)
        Path(f"{rank}.json").write_text(json.dumps([batches, loss]))
        return
    for name in WORKERS:
        if importlib.util.find_spec(name) is None:
            print(f"{name}: not installed", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            line = [*launcher, "--master-port", str(free_port()), __file__, "--worker", name]
            quiet = subprocess.DEVNULL  # torchft and hivemind print every quorum and every round
            subprocess.run([*line, "--seconds", str(given.seconds)], cwd=folder, check=True, stdout=quiet, stderr=quiet)
            (fast, loss), (slow, other) = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1))
        print(f"{name}: {fast} + {slow} batches, loss {loss:.3f}, {other:.3f}", flush=True)


if __name__ == "__main__":
    main()
