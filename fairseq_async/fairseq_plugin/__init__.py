"""The fairseq plugin: ``fairseq-train --user-dir`` imports it, and it registers its optimizers with fairseq.

Every method is registered here, once: its flags, its trainer and what else it needs.
"""

import atexit

from fairseq_async.errors import ConfigurationError, fail
from fairseq_async.fairseq_plugin import flags
from fairseq_async.fairseq_plugin.compat.checkpoints import trust_plain_data
from fairseq_async.fairseq_plugin.compat.numpy_names import restore_names
from fairseq_async.fairseq_plugin.compat.shutdown import end_prefetching
from fairseq_async.fairseq_plugin.hybrid import HybridAsync, HybridTrainer
from fairseq_async.fairseq_plugin.local_sgd import LocalSGDFlags, LocalSGDTrainer
from fairseq_async.fairseq_plugin.registry import AsynchronousMethod, SynchronousMethod, register_method
from fairseq_async.fairseq_plugin.synchronous.adascale import AdaScaleOptimizer, AdaScaleTrainer
from fairseq_async.fairseq_plugin.synchronous.adasum import AdasumOptimizer, AdasumTrainer

if __name__ != "fairseq_async.fairseq_plugin":  # fairseq imports a --user-dir by the name of its directory
    fail(ConfigurationError("--user-dir .../fairseq_async/fairseq_plugin: give the directory above, fairseq_async"))

register_method(
    "hybrid_async",
    HybridAsync,
    AsynchronousMethod(HybridTrainer, flags.describe_hybrid, flags.hybrid_server),
)
register_method(
    "local_sgd",
    LocalSGDFlags,
    AsynchronousMethod(LocalSGDTrainer, flags.describe_local_sgd, flags.local_sgd_server),
)
register_method("adasum", AdasumOptimizer, SynchronousMethod(AdasumTrainer, AdasumTrainer.check))
register_method("adascale", AdaScaleOptimizer, SynchronousMethod(AdaScaleTrainer, AdaScaleTrainer.check))

restore_names()
trust_plain_data()
atexit.register(end_prefetching)

__all__ = ["AdaScaleOptimizer", "AdasumOptimizer", "HybridAsync", "LocalSGDFlags"]
