"""The sdist and the wheel: complete, described, and enough to train with where nothing else of the project is."""

import email.message
import email.parser
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import fairseq_async
from tests.helpers.commands import PACKAGE, ROOT

NAME = f"fairseq_async-{fairseq_async.__version__}"
BUILD = "import setuptools.build_meta as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, out: Path) -> None:
    """What ``python -m build`` calls, with the setuptools that is here in place of one to download."""
    line = [sys.executable, "-c", BUILD, kind, str(out)]
    ended = subprocess.run(line, cwd=source, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked sdist, so that the sdist has all that the wheel needs."""
    folder = tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for each in ("fairseq_async", "deepspeed_config", "recipes", "scripts"):
        shutil.copytree(ROOT / each, folder / "tree" / each, ignore=ignored)
    for each in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / each, folder / "tree")
    build("build_sdist", folder / "tree", folder)
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(folder / "sdist")
    build("build_wheel", folder / "sdist" / NAME, folder)
    return folder / f"{NAME}-py3-none-any.whl"


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    kept = {str(each.relative_to(ROOT)) for each in PACKAGE.rglob("*") if each.suffix in (".py", ".pyi", ".typed")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == kept and "fairseq_async/py.typed" in names


def test_its_description_has_version_extras_and_the_tested_pythons(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{NAME}.dist-info/METADATA").decode()
    found: email.message.Message = email.parser.HeaderParser().parsestr(text)
    assert found["Version"] == fairseq_async.__version__ and found["Requires-Python"] == ">=3.10"
    assert set(found.get_all("Provides-Extra", [])) >= {"fairseq", "deepspeed", "huggingface", "tls", "ray", "dev"}
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    pythons = {
        f"Programming Language :: Python :: {each}"
        for each in workflow["jobs"]["train"]["strategy"]["matrix"]["python"]
    }
    assert pythons <= set(found.get_all("Classifier", [])) and len(pythons) == 4


@pytest.mark.usefixtures("executed")  # a fork has the packages of this environment, and pip would write into it
def test_the_wheel_trains_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """It sees torch and the other packages that are installed here, but neither the checkout nor an editable one."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*line: object) -> str:
        ended = subprocess.run(
            list(map(str, line)), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        return ended.stdout

    # --target, so that nothing but this directory can be written, whatever pip takes for its environment
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    assert run(python, "-c", "import fairseq_async; print(fairseq_async.__file__)").startswith(str(site))
    program = (python, site / "bin" / "fairseq-async")
    assert run(*program, "--version") == f"fairseq-async {fairseq_async.__version__}\n"
    assert "Next: fairseq-async report" in run(*program, "demo", "--steps", 4, "--out", tmp_path / "demo")
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 1000
