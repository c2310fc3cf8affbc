"""DeepSpeed scripts under the ``deepspeed`` launcher, on CPUs, and the configuration section."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from fairseq_async.deepspeed_plugin import config as configuration
from fairseq_async.errors import ConfigurationError, as_key, spell_options
from fairseq_async.options.addresses import free_port
from fairseq_async.options.config import LocalSGDOptions
from tests.helpers.commands import DEEPSPEED, DEEPSPEED_JOB, ROOT, Processes, command

WITHOUT_LOCAL_STEPS = ("hybrid_async", "adasum", "adascale")
CONFIGS = sorted((ROOT / "deepspeed_config").glob("*.json"))
HALF = {"fp16": {"enabled": True, "initial_scale_power": 4}, "bf16": {"enabled": True}}
SHORT = {"local_steps": 5, "total_steps": 40, "outer_lr": 0.7}
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(processes: Processes, tmp_path: Path) -> Run:
    """``run(ranks, out, section, …)``: the job to its end, with these options of the method."""

    def start(ranks: int, out: Path, section: dict[str, Any], *flags: object, **changes: Any) -> tuple[int, str]:
        launcher = [command("deepspeed"), "--num_accelerators", ranks, "--master_port", free_port()]
        change = json.dumps({"gradient_clipping": 0.0} | changes | {"async_training": section})
        base = ROOT / "deepspeed_config" / "delayed_nesterov.json"
        job = [DEEPSPEED_JOB, "--out", out, "--deepspeed", "--deepspeed_config", base, "--change", change, *flags]
        return processes.run([*launcher, *job], seconds=400, **DEEPSPEED)

    return start


def parameters(out: Path, name: str = "worker-0-0") -> torch.Tensor:
    state = torch.load(out / f"{name}.pt", weights_only=True)
    return torch.cat([tensor.double().flatten() for tensor in state.values()])


def summary(out: Path, name: str = "worker-0-0") -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return loaded


def events(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "run" / "events.jsonl").open()]


@pytest.mark.timeout(600)  # the first job on a machine compiles an extension of DeepSpeed's
def test_delayed_nesterov_with_a_grace_period_is_diloco(run: Run, tmp_path: Path) -> None:
    """Workers end with the same parameters, have drawn every sample as often as any other, and have learned."""
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}}
    for name, section in (
        ("diloco", {"outer": "diloco", "c": 0.0, "grace_period": None}),
        ("dn", {"grace_period": 60}),
    ):
        code, output = run(2, tmp_path / name, SHORT | section, **LEARNING, **monitor)
        assert code == 0, output
    theirs, ours = parameters(tmp_path / "diloco"), parameters(tmp_path / "dn")
    assert torch.linalg.vector_norm(ours - theirs) <= 1e-6 * torch.linalg.vector_norm(theirs)
    assert torch.equal(ours, parameters(tmp_path / "dn", "worker-1-0"))
    both = [summary(tmp_path / "dn", f"worker-{w}-0") for w in (0, 1)]
    assert [len(each["losses"]) for each in both] == [40, 40] and both[0]["progress"] == 40
    times = Counter(number for each in both for number in each["drawn"])
    assert len(times) == 256 and set(times.values()) == {2, 3}  # two and a half passes
    assert sum(both[0]["losses"][-16:]) < 0.8 * sum(both[0]["losses"][:16])
    assert both[0]["rates"][:4] == pytest.approx([0.0, 0.0, 0.002, 0.004])  # as DeepSpeed counts: one step late
    for job in ("job", "job-worker1"):  # each worker has curves of its own in DeepSpeed's monitor
        assert len((tmp_path / "csv" / job / "Async_cosine.csv").read_text().splitlines()) > 8


LEARNING = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 40, "warmup_num_steps": 10, "warmup_type": "linear"},
    },
}
ISLAND = SHORT | {"outer": "nesterov", "c": 0.0, "grace_period": None, "total_steps": 10}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The parameters of one process with the batch of an island of two."""
    out = tmp_path_factory.mktemp("single")
    change = json.dumps({"gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 16, "async_training": ISLAND})
    base = ROOT / "deepspeed_config" / "delayed_nesterov.json"
    job = [command("python"), DEEPSPEED_JOB, "--out", out, "--deepspeed_config", base, "--change", change]
    with Processes() as processes:
        code, output = processes.run(job, seconds=250, **DEEPSPEED)
    assert code == 0, output
    return parameters(out)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_island_is_one_worker_whatever_its_ranks_hold(
    run: Run, single: torch.Tensor, tmp_path: Path, stage: int
) -> None:
    """Two ranks that are synchronous are one process with twice the batch: here its masters are in fp32 on each rank,
    or in two partitions, also of parameters that do not divide by two; one of them exchanges them with a server at
    another address."""
    zero = {"zero_optimization": {"stage": stage}} if stage else {}
    bf16 = {"bf16": {"enabled": True}} if stage == 1 else {}
    remote = {"server": f"127.0.0.2:{free_port('127.0.0.2')}"} if stage == 2 else {}
    code, output = run(2, tmp_path / "island", ISLAND | {"island_size": 2} | remote, **zero, **bf16)
    assert code == 0, output
    island = parameters(tmp_path / "island")
    assert torch.equal(island, parameters(tmp_path / "island", "worker-0-1"))
    tolerance = 1e-2 if bf16 else 1e-6
    assert torch.linalg.vector_norm(island - single) <= tolerance * torch.linalg.vector_norm(single)
    assert [event["worker"] for event in events(tmp_path / "island")] == [0, 0]


def test_a_restart_goes_on_with_what_an_island_had_not_sent(run: Run, tmp_path: Path) -> None:
    """Two ranks, whose first encodes for both."""
    compress = {"push": {"codec": "topk", "chunk": 64, "keep": 8}, "pull": "int8"}
    section = SHORT | {"total_steps": 20, "compress": compress, "island_size": 2, "grace_period": 60}
    code, output = run(2, tmp_path / "whole", section, "--save-at", 10)
    assert code == 0, output
    code, output = run(2, tmp_path / "second", section, "--load", tmp_path / "whole" / "checkpoint")
    assert code == 0, output
    assert torch.equal(parameters(tmp_path / "whole"), parameters(tmp_path / "second"))
    before = {(event["worker"], event["sequence"]): event["residual_norm"] for event in events(tmp_path / "whole")}
    after = [
        before[event["worker"], event["sequence"]] == event["residual_norm"] for event in events(tmp_path / "second")
    ]
    assert after and all(after)


def test_hybrid_async_steps_in_the_server(run: Run, tmp_path: Path) -> None:
    """And follows DeepSpeed's schedule there, whose rate the engines show. Workers start from rounded parameters."""
    inner = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}},
    }
    method = {"method": "hybrid_async", "total_steps": 32, "updates_per_step": 2, "compress": {"pull": "bf16"}}
    config = ROOT / "deepspeed_config" / "hybrid_async.json"
    code, output = run(2, tmp_path, method, "--deepspeed_config", config, **inner)
    assert code == 0, output
    assert len(events(tmp_path)) == 64 and events(tmp_path)[-1]["version_after"] == 32
    assert all(event["start_payload"] for event in events(tmp_path))
    seen = summary(tmp_path)
    assert sum(seen["losses"][-8:]) < sum(seen["losses"][:8])
    assert max(seen["rates"]) == pytest.approx(0.02)


def few_steps(path: Path, out: Path, *flags: object, **changes: Any) -> list[object]:
    local = {} if path.stem in WITHOUT_LOCAL_STEPS else {"local_steps": 2}
    change = json.dumps(changes | {"async_training": {"total_steps": 4} | local})
    return ["--out", out, "--deepspeed_config", path, "--change", change, *flags]


@pytest.fixture(scope="module")
def each_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where each but Adasum's, which is of several ranks, has left what it came to, and what was printed."""
    out = tmp_path_factory.mktemp("files")
    jobs = [few_steps(path, out / path.stem) for path in CONFIGS if path.stem != "adasum"]
    diloco = ROOT / "deepspeed_config" / "diloco.json"
    jobs += [few_steps(diloco, out / name, "--save-at", 2, **{name: options}) for name, options in HALF.items()]
    (out / "jobs.json").write_text(json.dumps([[str(argument) for argument in job] for job in jobs]))
    line = [command("python"), "-m", "tests.helpers.deepspeed_jobs", out / "jobs.json"]
    with Processes() as processes:
        _, output = processes.run(line, seconds=280, **DEEPSPEED)
    return out, output


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS if path.stem != "adasum"])
def test_every_file_is_loaded_and_runs_a_few_steps(each_file: tuple[Path, str], name: str) -> None:
    out, output = each_file
    assert (out / name / "worker-0-0.json").exists(), output
    assert 4 <= summary(out / name)["progress"] < 8


@pytest.mark.parametrize("name", list(HALF))
def test_half_precision_engines_have_fp32_outer_state(each_file: tuple[Path, str], name: str) -> None:
    if name == "fp16" and not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed has no fp16 on this device")
    out, output = each_file
    model = torch.load(out / name / "worker-0-0.pt", weights_only=True)
    assert {tensor.dtype for tensor in model.values()} == {{"fp16": torch.half, "bf16": torch.bfloat16}[name]}, output
    (state,) = (out / name / "checkpoint").glob("*/async_server.pt")
    outer = torch.load(state, weights_only=True)["server"]["parameters"]
    assert outer.dtype == torch.float32 and not torch.equal(outer, outer.half().float())
    assert not torch.equal(outer, outer.bfloat16().float())


def test_the_file_of_adasum_is_loaded_and_runs_a_few_steps(processes: Processes, tmp_path: Path) -> None:
    launcher = [command("deepspeed"), "--num_accelerators", 2, "--master_port", free_port(), DEEPSPEED_JOB]
    job = few_steps(ROOT / "deepspeed_config" / "adasum.json", tmp_path)
    code, output = processes.run([*launcher, *job], seconds=250, **DEEPSPEED)
    assert code == 0, output
    assert 4 <= summary(tmp_path)["progress"] < 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outr": 1}, '"async_training": unknown key "outr"; known are .*outer.*, island_size, .*run_dir, .*server'),
        ({"method": "local"}, "\"method\": 'local' is none of adascale, adasum, hybrid_async, local_sgd"),
        ({"c": 0.5, "delay": 4}, r'"c" is 0.5: with "delay" 4 it must be in \[0, 1/4\]'),
        ({"delay": 0}, '"delay": Input should be greater than or equal to 1'),
        ({"island_size": 0}, '"island_size"'),
        ({"island_size": 2, "fragments": 2}, '"fragments" is not supported in a worker of several ranks'),
        ({"server": "10.0.0.1"}, r'"async_training": "server": an address is written HOST:PORT.*it is \'10.0.0.1\''),
        ({"outer": "sgd", "outer_momentum": 0.9}, '"outer_momentum" is of no use with "outer" sgd'),
    ],
)
def test_a_mistake_in_the_section_names_its_key(change: dict[str, Any], message: str) -> None:
    spell_options(as_key)
    config = json.loads(CONFIGS[-1].read_text())
    config["async_training"] = {"method": "local_sgd", "outer": "delayed_nesterov"} | change
    with pytest.raises(ConfigurationError, match=message) as caught:
        plain, section, options = configuration.split(config, "file.json")
        assert isinstance(options, LocalSGDOptions)
        options.for_workers(2)
        configuration.check(plain, options, section, "file.json")
    assert "\n" not in str(caught.value) and str(caught.value).startswith(("file.json", '"c" is'))


def test_a_file_that_is_missing_or_no_json_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        configuration.read(None, str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigurationError, match="not JSON"):
        configuration.read(None, str(tmp_path / "bad.json"))
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match="it must hold an object"):
        configuration.read(None, str(tmp_path / "list.json"))
    (tmp_path / "twice.json").write_text('{"zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(ConfigurationError, match='"stage" is there twice'):
        configuration.read(None, str(tmp_path / "twice.json"))
    with pytest.raises(ConfigurationError, match="config= is 5: give the name"):
        configuration.read(None, 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match='there is no section "async_training"'):
        configuration.split({}, "file.json")


def test_an_island_that_does_not_divide_the_ranks_is_one_line(run: Run, tmp_path: Path) -> None:
    code, output = run(2, tmp_path / "out", {"island_size": 3})
    assert code != 0 and '"island_size" is 3: it does not divide the 2 ranks' in output, output
    assert "Traceback" not in output
