"""Shows where the time of a plain step of fairseq goes: kernels, the process itself, and what other settings gain.

Each configuration is one process, a plain `fairseq-train`, of which some steps are profiled by torch after those that
are timed. All but the first are without cuDNN's attention, as in `gpu_training.py`. Kernels that take much less than
the step mean that the process launches them too slowly.
"""

from __future__ import annotations

import json as _json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.steps import run_main  # noqa: E402
from recipes.training import Method, Training  # noqa: E402
from scripts.bench import jobs  # noqa: E402
from scripts.bench.gpu_training import BASE, FASTEST  # noqa: E402
from scripts.bench.report import Report  # noqa: E402

WITHOUT = "without cuDNN's attention"
OTHERS: dict[str, dict[str, object]] = {
    "as it is": {},
    WITHOUT: {},
    "--memory-efficient-fp16": {"memory-efficient-fp16": True},
    "--num-workers 2": {"num-workers": 2},
    "--clip-norm 0": {"clip-norm": 0},
    "four times the tokens": {"max-tokens": 4 * BASE.max_tokens},
}
SKIPPED, TIMED, PROFILED = 30, 40, 5  # steps
RESULT = "PLAIN_STEP_RESULT"  # environment variable: where the process that trains writes its figures


def profile_trainer(path: Path) -> None:
    """Times and profiles the trainer of this process, then ends it; `path` gets the figures."""
    from fairseq.trainer import Trainer  # only in the process that trains

    step, seconds, steps = Trainer.train_step, [], [0]
    with_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * with_gpu
    profiler = torch.profiler.profile(activities=activities)

    def timed(self: Any, *arguments: Any, **named: Any) -> Any:
        steps[0] += 1
        if steps[0] == SKIPPED + TIMED:
            profiler.start()
        began = time.perf_counter()
        result = step(self, *arguments, **named)
        if with_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if steps[0] == SKIPPED + TIMED + PROFILED:
            profiler.stop()
            path.write_text(_json.dumps({"step s": median(seconds[SKIPPED : SKIPPED + TIMED]), **found(profiler)}))
            os._exit(0)
        return result

    Trainer.train_step = timed


def found(profiler: torch.profiler.profile) -> dict[str, Any]:
    """Returns the seconds of a step in kernels and in the process, kernels a step, and what takes longest in both."""
    averages = profiler.key_averages()
    # a range that fairseq names, such as a whole step, has the time between its kernels too
    of_gpu = [each for each in averages if each.self_device_time_total > 0 and not each.is_user_annotation]
    of_process = sorted(averages, key=lambda each: -each.self_cpu_time_total)[:8]
    longest = sorted(of_gpu, key=lambda each: -each.self_device_time_total)[:8]
    return {
        "kernels s": sum(each.self_device_time_total for each in of_gpu) / 1e6 / PROFILED,
        "process s": sum(each.self_cpu_time_total for each in averages) / 1e6 / PROFILED,
        "kernels": sum(each.count for each in of_gpu) // PROFILED,
        "longest": {each.key[:60]: each.self_device_time_total / 1e6 / PROFILED for each in longest},
        "longest in the process": {each.key[:60]: each.self_cpu_time_total / 1e6 / PROFILED for each in of_process},
    }


def main(
    data: Annotated[Path | None, typer.Option(help="Binarised data set, as the Multi30k recipe's raw/binary.")] = None,
    out: Annotated[Path, typer.Option(help="For corpus and logs.")] = Path("runs/bench"),
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
    small: Annotated[bool, typer.Option(help="A small model in fp32: to try this program on a CPU.")] = False,
) -> None:
    """Measure a plain step in several configurations."""
    jobs.claim(out)
    on_gpu = torch.cuda.is_available()
    report = Report(f"A plain step of fairseq: {torch.cuda.get_device_name() if on_gpu else 'CPU'}")
    settings = BASE.settings() | jobs.TIMED | {"seed": 1, "max-update": 1000, "fp16": True}
    settings |= {"encoder-attention-heads": 8, "decoder-attention-heads": 8}
    if small:
        settings |= {"encoder-layers": 1, "decoder-layers": 1, "fp16": False, "cpu": True}
        settings = {name: value for name, value in settings.items() if value is not False}
    binary, rows = jobs.corpus(data, out), list[dict[str, Any]]()
    for number, (name, changes) in enumerate(OTHERS.items()):
        if small and "fp16" in name:
            continue
        tokens = int(str(changes.get("max-tokens", BASE.max_tokens if not small else 500)))
        own = settings | {key: value for key, value in changes.items() if key != "max-tokens"}
        job = Training(binary, out / f"step-{number}", Method.SINGLE, 1, tokens, own)
        jobs.fresh(job)
        path = (out / f"step-{number}.json").absolute()
        line = [sys.executable, __file__, *job.command()[1:]]
        faster = {} if name == "as it is" else {"PYTHONPATH": f"{FASTEST}:{os.environ.get('PYTHONPATH', '')}"}
        with job.log.open("w") as log:
            code = subprocess.run(
                line, env=os.environ | {RESULT: str(path)} | faster, stdout=log, stderr=log, check=False
            ).returncode
        if code or not path.exists():
            sys.exit(f"error: {name} has ended with code {code}: {job.log}")
        figures = _json.loads(path.read_text())
        long = figures["longest"] or figures["longest in the process"]
        rows.append({"run": name, "tokens a batch": tokens, **{key: figures[key] for key in list(figures)[:4]}})
        report.table(name, [{"takes longest": key, "s a step": value} for key, value in long.items()])
        report.table("seconds of a step; all but the first without cuDNN's attention", rows)
        report.write(json)
    report.end(json)


if __name__ == "__main__":
    if RESULT in os.environ:
        from fairseq_cli.train import cli_main  # only in the process that trains

        profile_trainer(Path(os.environ[RESULT]))
        sys.argv[0] = "fairseq-train"
        cli_main()
    else:
        run_main(main)
