"""Runs of ``hf_callback_job.py``: the ``Trainer`` of transformers as workers of a server."""

import json
from pathlib import Path
from typing import Any

from fairseq_async.environment import SERVER, SLOWDOWN, TOKEN, WORKER, WORKERS
from fairseq_async.worker.start.server_process import ServerProcess
from tests.helpers.commands import HELPERS, ROOT, Processes, command

PATH = f"{HELPERS / 'without_fairseq'}:{ROOT}"


def train(
    folder: Path, workers: int, options: dict[str, Any], *checkpoints: str, slowdown: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """The events of the run, whose processes have all ended well; worker n goes on from the nth checkpoint if any."""
    module = "local_sgd_main" if options["method"] == "local_sgd" else "gradient_main"
    log = folder / "server.log"
    server = ServerProcess(
        f"fairseq_async.server.programs.{module}", workers, folder / "run", log, ends_with_workers=True
    )
    processes, outputs = Processes(), []
    try:
        own = json.dumps(options | {"run_dir": str(folder / "run")})
        line = [command("python"), HELPERS / "hf_callback_job.py", folder / "out", own]
        known = {SERVER: server.address, TOKEN: server.token, WORKERS: str(workers), "PYTHONPATH": PATH}
        slower = [{SLOWDOWN: each} for each in slowdown] or [{}] * workers
        started = [
            processes.start([*line, *checkpoints[n : n + 1]], **known, **{WORKER: str(n)}, **slower[n])
            for n in range(workers)
        ]
        outputs += [process.communicate(timeout=200)[0] for process in started]
        assert [process.returncode for process in started] == [0] * workers, outputs
        server.join(30)
        assert server.poll() == 0
    finally:
        processes.end()
        server.stop()
    return [json.loads(line) for line in (folder / "run" / "events.jsonl").open()]
