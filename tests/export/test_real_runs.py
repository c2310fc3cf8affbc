"""What ``fairseq-async export`` makes of checkpoints that fairseq and DeepSpeed have written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from safetensors.torch import load_file

from fairseq_async.export import Format, export
from tests.helpers.commands import DEEPSPEED, DEEPSPEED_JOB, ROOT, Processes, command


def test_an_exported_fairseq_checkpoint_is_loaded_by_fairseqs_generate(
    launch: Callable[..., tuple[int, str]], data: Path, tmp_path: Path
) -> None:
    """By the loader of ``fairseq-generate``; in fp32 its parameters are the server's, to the bit."""
    code, output = launch(1, tmp_path / "run", "--max-update", 6, "--no-epoch-checkpoints")
    assert code == 0, output
    saved = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)
    assert export(tmp_path / "run", tmp_path / "model.pt") is Format.FAIRSEQ
    assert (tmp_path / "model.pt").stat().st_size < (tmp_path / "run" / "checkpoint_last.pt").stat().st_size / 2
    models, _ = checkpoint_utils.load_model_ensemble([str(tmp_path / "model.pt")], {"data": str(data)})
    parameters = torch.cat([parameter.detach().flatten() for parameter in models[0].parameters()])
    assert torch.equal(parameters, saved["last_optimizer_state"]["server"]["parameters"])
    export(tmp_path / "run" / "checkpoint_last.pt", tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == saved["model"].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved["model"].items())


@pytest.fixture
def deepspeed_checkpoint(processes: Processes, tmp_path: Path) -> Path:
    """Of a worker of local SGD that is one step ahead of the server."""
    section = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0, "local_steps": 4, "total_steps": 8}
    change: dict[str, Any] = {"async_training": section, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    change |= {"optimizer": {"type": "SGD", "params": {"lr": 0.05}}, "zero_allow_untested_optimizer": True}
    config = ["--deepspeed_config", ROOT / "deepspeed_config" / "diloco.json", "--change", json.dumps(change)]
    line = [command("python"), DEEPSPEED_JOB, "--out", tmp_path / "out", "--save-at", 5, *config]
    code, output = processes.run(line, seconds=200, **DEEPSPEED)
    assert code == 0, output
    return tmp_path / "out" / "checkpoint"


def test_an_exported_deepspeed_checkpoint_has_the_servers_parameters_and_zero_to_fp32_the_workers(
    deepspeed_checkpoint: Path, tmp_path: Path
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    export(deepspeed_checkpoint, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    state = torch.load(deepspeed_checkpoint / "global_step5" / "async_server.pt", weights_only=True)
    parameters = torch.cat([found[row[0]].flatten() for row in state["layout"]])
    assert torch.equal(parameters, state["server"]["parameters"])
    local = get_fp32_state_dict_from_zero_checkpoint(str(deepspeed_checkpoint))
    assert local.keys() == found.keys() and not any(torch.equal(local[name], found[name]) for name in found)
