"""A rule from a file outside of the package trains in the simulator, in fairseq and in DeepSpeed."""

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairseq_async.environment import PLUGINS
from fairseq_async.method import methods
from fairseq_async.options.addresses import free_port
from tests.helpers.commands import DEEPSPEED, MODEL, ROOT, Processes, command
from tests.helpers.waiting import wait_until

OUTER = {"method": "local_sgd", "outer": "shrinking", "local_steps": 3, "shrink": 0.75}


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The user's file, outside of the package."""
    path = tmp_path / "my_rules.py"
    shutil.copy(Path(__file__).with_name("rules_of_ones_own.py"), path)
    return path


FLAGS = ["--optimizer", "local_sgd", "--outer", "shrinking", "--local-steps", 3, "--shrink", 0.75]


def described(run_dir: Path) -> dict[str, Any]:
    options: dict[str, Any] = json.loads((run_dir / "run.json").read_text())["method"]["options"]
    return options


def built_in_the_server(run_dir: Path, value: float) -> bool:
    return f"built with {value}" in (run_dir / "logs" / "server.log").read_text()


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "events.jsonl").open()]


def test_a_rule_of_ones_own_is_simulated(processes: Processes, tmp_path: Path, plugin: Path) -> None:
    """With another value of the rule's own option the run is another."""
    given = {
        "problem": {"type": "gaussians", "samples": 256, "hidden": 8},
        "methods": {"mine": OUTER, "less": OUTER | {"shrink": 0.001}},
        "steps": 12,
        "optimizer": {"type": "sgd", "lr": 0.1},
        "cluster": {"workers": 2},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(given))
    line = [command("fairseq-async"), "simulate", tmp_path / "mine.yaml", "--out", tmp_path / "out"]
    code, output = processes.run(line, **{PLUGINS: str(plugin)})
    assert code == 0, output
    runs = {described(path.parent)["shrink"]: losses(path.parent) for path in (tmp_path / "out").rglob("events.jsonl")}
    assert set(runs) == {OUTER["shrink"], 0.001} and runs[OUTER["shrink"]] != runs[0.001]


def test_a_rule_of_ones_own_trains_in_fairseq_and_is_replayed(
    processes: Processes, data: Path, tmp_path: Path, plugin: Path
) -> None:
    launcher = [command("fairseq-async"), "launch", "--workers", 2, "--", "fairseq-train", data, *MODEL]
    run_dir, mine = tmp_path / "run", {PLUGINS: str(plugin)}
    limits = ["--max-update", 9, "--disable-validation", "--record", "--save-dir", run_dir]
    code, output = processes.run([*launcher, *FLAGS, *limits], **mine)
    assert code == 0, output
    assert described(run_dir)["shrink"] == OUTER["shrink"] and len(losses(run_dir)) >= 6
    assert built_in_the_server(run_dir, OUTER["shrink"])
    code, output = processes.run([command("fairseq-async"), "replay", run_dir], **mine)
    assert code == 0 and "all equal to the recorded ones" in output, output


def test_a_rule_of_ones_own_trains_in_deepspeed(processes: Processes, tmp_path: Path, plugin: Path) -> None:
    launcher = [command("deepspeed"), "--num_accelerators", 2, "--master_port", free_port()]
    base = ROOT / "deepspeed_config" / "diloco.json"
    config = json.loads(base.read_text())
    config["async_training"] = OUTER | {"total_steps": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = [ROOT / "tests/helpers/deepspeed_job.py", "--out", tmp_path / "out", "--deepspeed"]
    environment = DEEPSPEED | {PLUGINS: str(plugin), "PYTHONPATH": f"{ROOT / 'tests/helpers/without_fairseq'}:{ROOT}"}
    line = [*launcher, *job, "--deepspeed_config", tmp_path / "config.json"]
    code, output = processes.run(line, seconds=280, **environment)
    assert code == 0, output
    run_dir = tmp_path / "out" / "run"
    assert described(run_dir)["shrink"] == OUTER["shrink"] and len(losses(run_dir)) >= 6
    assert built_in_the_server(run_dir, OUTER["shrink"])


Check = Callable[[list[str]], tuple[int, str]]


@pytest.fixture
def check(processes: Processes) -> Check:
    """``check(plugins)``: what launch says of a worker that names the rule."""

    def run(plugins: list[str]) -> tuple[int, str]:
        job = ["fairseq-train", "data", "--optimizer", "local_sgd", "--outer", "shrinking", "--shrink", "2"]
        line = [command("fairseq-async"), "launch", "--workers", "2", "--", *job]
        return processes.run(line, **{PLUGINS: ",".join(plugins)})

    return run


def test_an_option_of_ones_own_is_checked_before_anything_starts(check: Check, plugin: Path) -> None:
    code, output = check([str(plugin)])
    assert code == 2 and output.count("\n") == 1, output
    assert "--shrink: Input should be less than or equal to 1 (it is 2)" in output


def test_a_rule_whose_file_is_not_named_is_unknown(check: Check) -> None:
    code, output = check([])
    assert code == 2 and "--outer: Input should be 'diloco', " in output and "(it is 'shrinking')" in output


@pytest.mark.parametrize(
    ("text", "said"), [("1 +", "SyntaxError"), ("import nothing_here", "No module named 'nothing_here'")]
)
def test_a_file_that_cannot_be_imported_is_one_line(check: Check, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    code, output = check([str(tmp_path / "bad.py")])
    assert code == 2 and output.count("\n") == 1, output
    assert f"error: {PLUGINS}: {tmp_path / 'bad.py'} cannot be imported: " in output and said in output


@pytest.mark.parametrize("named", ["a_plugin_of_mine", "a_plugin_of_mine.py"])
def test_a_plugin_of_the_working_directory_imports_what_is_beside_it_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    (tmp_path / "a_plugin_of_mine.py").write_text("import beside_my_plugin\nimport colorsys\n")
    (tmp_path / "beside_my_plugin.py").write_text("")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('not the standard library')\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # pytest's may have the working directory
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(PLUGINS, named)
    for module in ("a_plugin_of_mine", "beside_my_plugin", "colorsys"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    try:
        methods.outer_rules()
        assert sys.modules["a_plugin_of_mine"].colorsys.rgb_to_hsv is not None
    finally:
        methods._imported.discard(named)


def test_a_thread_waits_for_a_plugin_that_another_one_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "takes_a_while.py"
    plugin.write_text("import time\nbegun = True\ntime.sleep(0.5)\nready = True\n")
    monkeypatch.setenv(PLUGINS, str(plugin))
    first = threading.Thread(target=methods.import_plugins)
    first.start()
    wait_until(lambda: hasattr(sys.modules.get(plugin.stem), "begun"))
    methods.import_plugins()
    assert hasattr(sys.modules.pop(plugin.stem), "ready")
    first.join(10)
