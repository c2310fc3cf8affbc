"""Trains a language model by asynchronous local SGD, as a script of DeepSpeed's launcher:

    deepspeed --num_gpus 4 recipes/c4_lm/train.py --deepspeed \
        --deepspeed_config deepspeed_config/async_sgd.json --model 20m --data DIR --steps 64000

Every process is a worker (or, with "island_size", a part of one). Worker 0 scores and saves the server's parameters.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fairseq_async.deepspeed_plugin as deepspeed_async  # noqa: E402
from recipes.c4_lm import text, tokens  # noqa: E402
from recipes.c4_lm.llama import LlamaForCausalLM  # noqa: E402
from recipes.c4_lm.models import SEQUENCE, SIZES, ModelSpec, build, load_model  # noqa: E402
from recipes.c4_lm.run import CHECKPOINTS, MODEL, Run  # noqa: E402
from recipes.c4_lm.settings import SECTION, configuration  # noqa: E402
from recipes.c4_lm.tokens import Prepared  # noqa: E402
from recipes.steps import RecipeError, program  # noqa: E402


class Parser(argparse.ArgumentParser):
    """A parser that reports an error as one line from one process, not as a page from each process."""

    def error(self, message: str) -> NoReturn:
        refuse(f"{message} (--help lists the options)")


def positive(value: str) -> int:
    """Parse a whole number above 0."""
    if not value.isdigit() or int(value) == 0:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number above 0")
    return int(value)


def parse() -> argparse.Namespace:
    parser = Parser(prog=program(), description="Train a language model on C4 by asynchronous local SGD.")
    add = parser.add_argument
    add("--model", choices=SIZES, default="20m", help="tiny for CPUs; 20m, 60m and 150m are those of Liu et al., 2024")
    add("--data", type=Path, help="directory of .jsonl, .jsonl.gz or .parquet shards; by default C4 is streamed")
    add(
        "--documents", type=positive, help=f"number of documents; all of --data, or {text.STREAMED:,} of C4, by default"
    )
    add("--out", type=Path, default=Path("runs/c4_lm"), help="for all files; reuses prepared text")
    add("--vocab", type=positive, help="pieces of the vocabulary; 32,000 by default, for tiny 8,000")
    add("--init", type=Path, help="start from the parameters of this checkpoint, a directory with model.pt")
    add("--steps", type=positive, help='mean local steps of a worker in the whole run; else "total_steps" of the JSON')
    add("--batch-size", type=positive, help="sequences of a local step, where the JSON does not say; 8 by default")
    add("--seed", type=positive, help='of the parameters and the order of the data; else "seed" of the JSON, or 1')
    add("--eval-every", type=positive, help="score and save every so many mean local steps, besides at the end")
    add("--resume", action="store_true", help="go on with the run in --out, where there is one")
    add("--local_rank", type=int, default=0, help="set by DeepSpeed's launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def local_rank() -> int:
    """Return this process's rank on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def refuse(message: str) -> NoReturn:
    """End the run with a message of one line.

    All processes of a machine call this with the same message. The first one prints it and exits, and the launcher then
    ends the others. They wait, because if one of them exited earlier, the launcher would kill the first before it has
    printed.
    """
    if local_rank() == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(600)
    raise SystemExit(2)


def prepare(args: argparse.Namespace) -> Prepared:
    """Turn the documents into tokens in the first process of this machine; the others wait until the tokens exist.

    Only the first process checks the text and existing tokens, and reports what is wrong.
    """
    if local_rank() > 0:
        while not tokens.there(args.out):
            time.sleep(0.2)
        return tokens.open_prepared(args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # against other runs with the same --out
        if not args.resume and any((args.out / name).exists() for name in (MODEL, CHECKPOINTS)):
            raise RecipeError(f"--out {args.out} holds a run: go on with it by --resume, or change --out")
        return tokens.prepare(corpus(args), args.vocab or SIZES[args.model].vocab, args.out)


def corpus(args: argparse.Namespace) -> text.Corpus:
    """Return the documents of `--data`, or those of C4, downloaded."""
    if args.data is not None:
        return text.find(args.data, args.documents)
    return text.find(text.stream(args.out, args.documents or text.STREAMED))


def initial(args: argparse.Namespace, spec: ModelSpec, seed: int) -> LlamaForCausalLM:
    """Return the initial model: the one of `--init`, or a fresh one."""
    if args.init is None:
        torch.manual_seed(seed)
        return build(spec)
    model, theirs = load_model(args.init)
    if theirs != spec:
        raise RecipeError(
            f"--init {args.init}: a {theirs.model} model of {theirs.vocab_size:,} pieces; this run's is a {spec.model} "
            f"model of {spec.vocab_size:,}, and the vocabulary must be the same one"
        )
    return model


def main() -> None:
    args = parse()
    try:
        config = configuration(args)
        prepared = prepare(args)
        spec = ModelSpec(args.model, prepared.meta["vocab_size"], prepared.meta["tokenizer"])
        model = initial(args, spec, config[SECTION].get("seed", 1))
        train_set, validation_set = (prepared.dataset(split, SEQUENCE) for split in text.SPLITS)
        if not len(train_set):
            raise RecipeError(f"the training text has {train_set.counts.tokens} tokens: {SEQUENCE} make a sequence")
    except RecipeError as error:
        refuse(str(error))
    engine, _, loader, _ = deepspeed_async.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=train_set, config=config
    )
    run = Run(engine, spec, args.out, config[SECTION]["total_steps"], prepared.tokenizer, validation_set)
    if args.resume:
        run.resume()
    run.train(loader, args.eval_every)
    if run.is_writer:
        print(f"model       {args.out / MODEL}")


if __name__ == "__main__":
    main()
