"""``fairseq-async export --format hf``: ``from_pretrained`` finds all that it needs, or the export is refused."""

import json
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fairseq_async.errors import ConfigurationError
from fairseq_async.export import Format, export
from fairseq_async.protocol import Layout

Named = Iterable[tuple[str, Tensor]]
TOKENS = torch.arange(6)[None]
ATTENTION = "base_model.model.transformer.h.0.attn.c_attn"


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    audio = ModuleType("torchaudio")  # transformers would import it; it may not fit this torch
    audio.__spec__ = ModuleSpec("torchaudio", None)
    monkeypatch.setitem(sys.modules, "torchaudio", audio)
    return pytest.importorskip("transformers")


@pytest.fixture
def model(transformers: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8)
    return transformers.GPT2LMHeadModel(config).eval()


def save(folder: Path, named: Named, **config: Any) -> Path:
    """A run's directory with a snapshot of these parameters; ``config`` goes into its files of configuration."""
    (folder / "run" / "snapshots").mkdir(parents=True)
    kept = list(named)
    server = {"version": 3, "parameters": torch.cat([tensor.detach().flatten() for _, tensor in kept])}
    state = {"method": "local_sgd", "layout": Layout.of(kept).to_json(), "server": server}
    torch.save(state, folder / "run" / "snapshots" / "version-000000000003.pt")
    for name, content in config.items():
        (folder / "run" / f"{name}.json").write_text(json.dumps(content))
    return folder / "run"


class Outer(nn.Module):
    def __init__(self, model: nn.Module, extra: bool = False) -> None:
        super().__init__()
        self.model = model
        if extra:
            self.head = nn.Linear(2, 2)


WRAPPED: dict[str, Callable[[Any], Named]] = {
    "plain": lambda model: model.named_parameters(),
    "compiled": lambda model: torch.compile(model).named_parameters(),
    "part of another module": lambda model: Outer(model).named_parameters(),
    "both": lambda model: Outer(torch.compile(model)).named_parameters(),  # type: ignore[arg-type]
    "without its tied head": lambda model: model.transformer.named_parameters(),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
def test_a_wrapped_model_is_written_under_the_names_of_its_configuration(
    transformers: Any, model: Any, tmp_path: Path, wrap: Callable[[Any], Named]
) -> None:
    run = save(tmp_path, wrap(model), config=model.config.to_dict() | {"architectures": ["GPT2LMHeadModel"]})
    assert export(run, tmp_path / "out") is Format.HF
    found, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(found.eval()(TOKENS).logits, model(TOKENS).logits)


def test_the_trained_tensors_of_a_wrapped_model_replace_those_of_worker_0_in_a_checkpoint(
    model: Any, tmp_path: Path
) -> None:
    """The script has compiled it; the Trainer has saved it as it is."""
    run = save(tmp_path, torch.compile(model).named_parameters(), config={})
    state = next((run / "snapshots").iterdir()).rename(run / "async_server.pt")
    assert state.exists()
    local = {name: torch.zeros_like(tensor) for name, tensor in model.named_parameters()}
    save_file(local | {"statistics": torch.ones(1)}, run / "model.safetensors")
    export(run, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == local.keys() | {"statistics"}
    assert all(torch.equal(found[name], tensor) for name, tensor in model.named_parameters())


def untied(model: Any) -> Named:
    model.config.tie_word_embeddings = False
    return list(model.transformer.named_parameters())


def other_vocabulary(model: Any) -> Named:
    model.config.vocab_size = 17
    return list(model.named_parameters())


REFUSED: dict[str, tuple[Callable[[Any], Named], str]] = {
    "a head is missing": (untied, "lm_head.weight of GPT2LMHeadModel .* at random"),
    "a frozen part": (lambda m: m.transformer.h.named_parameters(), "transformer.wte.weight|is not among the tensors"),
    "more than the model": (lambda model: Outer(model, extra=True).named_parameters(), "head.bias is not in GPT2LM"),
    "names cut within a word": (lambda m: [(n[1:], p) for n, p in m.named_parameters()], "ransformer.* is not in GPT2"),
    "another model": (lambda model: nn.Linear(2, 2).named_parameters(), "GPT2LMHeadModel"),
    "another shape": (other_vocabulary, "transformer.wte.weight is 16x8, and 17x8 in GPT2LMHeadModel"),
}


@pytest.mark.parametrize(("named", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_from_pretrained_would_complete_at_random_is_refused(
    model: Any, tmp_path: Path, named: Callable[[Any], Named], said: str
) -> None:
    parameters = named(model)
    run = save(tmp_path, parameters, config=model.config.to_dict() | {"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(ConfigurationError, match=said) as error:
        export(run, tmp_path / "out")
    assert "--format safetensors" in str(error.value) and not (tmp_path / "out").exists()


def test_a_model_that_nothing_describes_is_refused(model: Any, tmp_path: Path) -> None:
    run = save(tmp_path, model.named_parameters(), config={"architectures": ["OfTheScript"], "model_type": "own"})
    with pytest.raises(ConfigurationError, match="no model that transformers knows"):
        export(run, tmp_path / "out")


def test_a_configuration_that_names_no_class_is_that_of_its_bare_model(
    transformers: Any, model: Any, tmp_path: Path
) -> None:
    run = save(tmp_path, model.transformer.named_parameters(), config=model.config.to_dict() | {"architectures": None})
    export(run, tmp_path / "out")
    _, info = transformers.AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_weights_beside_a_configuration_may_be_of_before(model: Any, tmp_path: Path) -> None:
    """As where the script has enlarged the vocabulary: what ``from_pretrained`` makes is of the configuration."""
    model.config.save_pretrained(tmp_path / "given")
    described = model.config.to_dict() | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "given" / "config.json").write_text(json.dumps(described))
    before = {name: torch.zeros(2, 2) for name, _ in model.named_parameters()}
    save_file(before, tmp_path / "given" / "model.safetensors")
    export(save(tmp_path, model.named_parameters()), tmp_path / "out", config=tmp_path / "given")
    assert load_file(tmp_path / "out" / "model.safetensors")["transformer.wte.weight"].shape == (16, 8)


def test_code_beside_a_configuration_is_not_run(model: Any, tmp_path: Path) -> None:
    run = save(tmp_path, model.named_parameters(), config={"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    (run / "own.py").write_text(
        f"import transformers\nopen({str(tmp_path / 'ran')!r}, 'w')\nclass Own(transformers.GPT2Config): pass\n"
    )
    with pytest.raises(ConfigurationError, match="no model that transformers knows"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


# Adapters of PEFT, whose names are these


def lora(adapter: str = "default") -> dict[str, Tensor]:
    return {
        f"{ATTENTION}.lora_A.{adapter}.weight": torch.randn(2, 8),
        f"{ATTENTION}.lora_B.{adapter}.weight": torch.randn(24, 2),
    }


HEAD = {"base_model.model.lm_head.modules_to_save.default.weight": torch.ones(16, 8)}


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "model."])
def test_an_adapter_is_written_as_an_adapter(tmp_path: Path, prefix: str) -> None:
    """Without the base model's configuration beside it, which would make it a model without weights."""
    tensors = lora() | HEAD
    run = save(tmp_path, [(prefix + name, value) for name, value in tensors.items()], adapter_config={}, config={})
    export(run, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    names = [f"{ATTENTION}.lora_A.weight", f"{ATTENTION}.lora_B.weight", "base_model.model.lm_head.weight"]
    assert list(map(torch.equal, map(found.__getitem__, names), tensors.values())) == [True] * 3 and len(found) == 3


def test_each_kind_of_part_of_an_adapter_has_pefts_name_in_a_file(tmp_path: Path) -> None:
    kinds = ["ia3_l", "lora_embedding_A", "lora_embedding_B"]
    tensors = [(f"{ATTENTION}.{kind}.default", torch.ones(2, 2)) for kind in kinds]
    export(save(tmp_path, tensors, adapter_config={}), tmp_path / "out")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == {f"{ATTENTION}.{kind}" for kind in kinds}
    half = save(tmp_path / "half", tensors[2:], adapter_config={})
    with pytest.raises(ConfigurationError, match="lora_embedding_A, to which .*lora_embedding_B belongs, is not among"):
        export(half, tmp_path / "other")


def test_what_is_frozen_in_an_adapter_comes_from_the_checkpoint(tmp_path: Path) -> None:
    (a, frozen), (b, trained) = lora().items()
    whole = [(name.replace("h.0", "h.1"), torch.ones(shape)) for name, shape in ((a, (2, 8)), (b, (24, 2)))]
    run = save(tmp_path, [*whole, (b, trained)], adapter_config={})
    with pytest.raises(ConfigurationError, match="lora_A.weight, to which .*lora_B.weight belongs, is not among"):
        export(run, tmp_path / "out")
    next((run / "snapshots").iterdir()).rename(run / "async_server.pt")
    saved = {name.replace(".default", ""): value for name, value in (*whole, (a, frozen), (b, torch.zeros(24, 2)))}
    save_file(saved, run / "adapter_model.safetensors")
    export(run, tmp_path / "out")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == saved.keys()
    assert torch.equal(found[f"{ATTENTION}.lora_A.weight"], frozen)
    assert torch.equal(found[f"{ATTENTION}.lora_B.weight"], trained)


def test_an_adapter_is_found_in_a_checkpoint_of_deepspeed_with_a_base_in_it(tmp_path: Path) -> None:
    """The Trainer writes the adapter's configuration beside DeepSpeed's directory, in whose file the base may be."""
    tensors = lora()
    run = save(tmp_path, tensors.items(), adapter_config={})
    (run / "global_step3").mkdir()
    next((run / "snapshots").iterdir()).rename(run / "global_step3" / "async_server.pt")
    base = {"base_model.model.lm_head.weight": torch.ones(16, 8)}
    old = {name: torch.zeros_like(value) for name, value in tensors.items()}
    torch.save({"module": old | base}, run / "global_step3" / "mp_rank_00_model_states.pt")
    (run / "latest").write_text("global_step3")
    export(run, tmp_path / "out")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.replace(".weight", ".default.weight") for name in found} == tensors.keys()
    assert all(torch.equal(found[name.replace(".default", "")], value) for name, value in tensors.items())


OTHER_ADAPTERS: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "no configuration": (lora(), {"config": {}}, "there is no adapter_config.json, and the tensors are an adapter's"),
    "several": (lora() | lora("second"), {"adapter_config": {}}, "there are the adapters"),
    "of another kind": (
        lora() | {"base_model.prompt_encoder.default.embedding.weight": torch.ones(2, 8)},
        {"adapter_config": {}},
        "prompt_encoder.default.embedding.weight is of no LoRA or IA3",
    ),
}


@pytest.mark.parametrize(("tensors", "files", "said"), OTHER_ADAPTERS.values(), ids=OTHER_ADAPTERS.keys())
def test_an_adapter_that_cannot_be_written_as_one_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], files: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        export(save(tmp_path, tensors.items(), **files), tmp_path / "out")
    export(tmp_path / "run", tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors").keys() == tensors.keys()


def test_a_base_is_for_adapters_and_needs_peft(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    adapter = save(tmp_path, lora().items(), adapter_config={})
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigurationError, match="--base: PEFT merges, and it is not here .*pip install peft"):
        export(adapter, tmp_path / "out", base=tmp_path / "base")
    with pytest.raises(ConfigurationError, match="--base: is for --format hf"):
        export(adapter, tmp_path / "out.pt", base=tmp_path / "base")
    whole = save(tmp_path / "whole", model.named_parameters(), config=model.config.to_dict())
    with pytest.raises(ConfigurationError, match="there is no adapter"):
        export(whole, tmp_path / "out", base=tmp_path / "base")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"task_type": None},
        {"task_type": "CAUSAL_LM", "use_dora": True},
        {"task_type": "CAUSAL_LM", "modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_peft_loads_and_merges_what_is_written(
    transformers: Any, model: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The task says of which class the model is, and its configuration only where there is none."""
    peft = pytest.importorskip("peft")
    model.config.tie_word_embeddings = "modules_to_save" not in options
    model.save_pretrained(tmp_path / "base")
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, **options)
    trained = peft.get_peft_model(base, config)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 2)
    named = [(name, value) for name, value in trained.named_parameters() if value.requires_grad]
    run = save(tmp_path, named)
    trained.peft_config["default"].save_pretrained(run)
    expected = trained.eval()(TOKENS).logits
    assert not torch.allclose(expected, model(TOKENS).logits)
    export(run, tmp_path / "adapter")
    trained.save_pretrained(tmp_path / "by_peft")
    files = [load_file(tmp_path / each / "adapter_model.safetensors") for each in ("adapter", "by_peft")]
    assert files[0].keys() == files[1].keys()
    fresh = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    assert torch.equal(peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()(TOKENS).logits, expected)
    if options["task_type"] is not None:
        described = json.loads((tmp_path / "base" / "config.json").read_text())
        (tmp_path / "base" / "config.json").write_text(json.dumps(described | {"architectures": ["GPT2Model"]}))
    export(run, tmp_path / "merged", base=tmp_path / "base")
    merged, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not (tmp_path / "merged" / "adapter").exists()
    torch.testing.assert_close(merged.eval()(TOKENS).logits, expected)
