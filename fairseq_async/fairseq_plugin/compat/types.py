"""Names for the types of fairseq's objects, which are ``Any`` to a type checker.

fairseq has no annotations that mypy could follow: its trainer sets attributes as it goes, and its configuration is an
OmegaConf container, whose attributes are its keys.
"""

from typing import Any

#: fairseq's whole configuration; ``cfg.optimizer`` is the command line's Namespace for our optimizers.
FairseqConfig = Any

#: A task, model, criterion, optimizer, schedule, iterator, batch or trainer of fairseq.
FairseqObject = Any

#: What ``torch.save`` writes: numbers, strings, tensors, lists and dictionaries, nested.
StateDict = dict[str, Any]
