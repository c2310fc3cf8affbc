"""What a launch that never became a run has made is removed, and nothing else."""

from pathlib import Path

import pytest

from fairseq_async.records.created_files import CreatedFiles


def begin(run_dir: Path) -> None:
    """As the processes of a run do."""
    for name in (
        "logs/server.log",
        "logs/worker-0.log",
        "snapshots/version-000000000000.pt",
        "run.json",
        "events.jsonl",
    ):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).touch()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_of_a_run_that_never_began_nothing_is_left(tmp_path: Path) -> None:
    created = CreatedFiles(tmp_path / "new" / "run")
    begin(tmp_path / "new" / "run")
    created.remove(logs=True)
    assert files(tmp_path) == set()


def test_logs_stay_where_an_error_names_them(tmp_path: Path) -> None:
    created = CreatedFiles(tmp_path / "run")
    begin(tmp_path / "run")
    created.remove(logs=False)
    assert files(tmp_path) == {"run", "run/logs", "run/logs/server.log", "run/logs/worker-0.log"}


def test_what_was_there_before_stays(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "checkpoint_last.pt").touch()
    before, created = files(tmp_path), CreatedFiles(tmp_path)
    (tmp_path / "logs" / "worker-1.log").touch()
    (tmp_path / "snapshots" / "version-000000000007.pt").touch()
    created.remove(logs=True)
    assert files(tmp_path) == before


def test_directories_with_something_in_them_stay(tmp_path: Path) -> None:
    created = CreatedFiles(tmp_path / "run")
    begin(tmp_path / "run")
    created.remove_directories()
    assert "run/logs/server.log" in files(tmp_path) and "run/run.json" in files(tmp_path)


@pytest.mark.parametrize("suffix", [".before", ".other"])
def test_a_snapshot_that_this_launch_has_set_aside_has_its_name_again(tmp_path: Path, suffix: str) -> None:
    """Whoever forgot ``--resume``, or gave another model, ends the launch and gives the right command."""
    begin(tmp_path)
    earlier = tmp_path / f"snapshots/version-000000000009{suffix}"
    earlier.touch()
    before, created = files(tmp_path), CreatedFiles(tmp_path)
    path = tmp_path / "snapshots/version-000000000000.pt"
    path.rename(path.with_suffix(suffix))
    created.remove(logs=True)
    assert files(tmp_path) == before
