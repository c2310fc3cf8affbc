import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
INSTALL = ["torch>=2.6", "numpy>=1.26", "typer>=0.12", "rich>=13", "pydantic>=2.8", "typing-extensions>=4.6"]
INSTALL += ["pyyaml>=6", "matplotlib>=3.8"]  # the simulator and its report
INSTALL += ["safetensors>=0.4"]  # exports
# fairseq-fixed is fairseq 0.12 made to import on Python 3.11 and later; its import name is fairseq. Pinned, because the
# plugin builds on the order of calls inside its Trainer.train_step. An extra, because it compiles for minutes.
FAIRSEQ = ["fairseq-fixed==0.12.3.1"]
# Pinned, because the plugin overrides the engine's step and reads where each optimizer keeps its fp32 masters.
DEEPSPEED = ["deepspeed==0.19.8"]
# From 5.6 on, because 5.2 to 5.5.3 divide a gradient by the number of its micro-batches twice.
HUGGINGFACE = [*DEEPSPEED, "transformers>=5.6", "accelerate>=1.10"]
# An extra, because only the machine that makes a run's certificates needs it; connections are encrypted by the standard
# library, also with certificates that others have made.
TLS = ["cryptography>=42"]
# An extra, because only those need it who have a cluster of Ray; it is tested with 2.60.
RAY = ["ray>=2.40,<3"]
RECIPES = [*FAIRSEQ, *HUGGINGFACE, "sentencepiece>=0.2", "sacrebleu>=2.4", "tensorboard>=2.16", "datasets>=4"]
RECIPES += ["peft>=0.17"]
DEV = ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100"]
DEV += ["ruff==0.17.5", "mypy==2.4.1", "build>=1.2"]


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "fairseq_async/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


setup(
    name="fairseq-async",
    version=version(),
    description="Asynchronous training of one model: for fairseq, DeepSpeed, the Trainer of transformers, and PyTorch",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    keywords="asynchronous training, local SGD, DiLoCo, parameter server, Adasum, AdaScale, fairseq, DeepSpeed",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: {each}" for each in ("3", *PYTHONS)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["fairseq_async", "fairseq_async.*"]),
    package_data={"fairseq_async": ["py.typed", "torch/*.pyi"]},
    python_requires=">=3.10",
    install_requires=INSTALL,
    extras_require={
        "fairseq": FAIRSEQ,
        "deepspeed": DEEPSPEED,
        "huggingface": HUGGINGFACE,
        "recipes": RECIPES,
        "tls": TLS,
        "ray": RAY,
        "dev": RECIPES + TLS + DEV,
    },
    entry_points={"console_scripts": ["fairseq-async=fairseq_async.cli:main"]},
)
