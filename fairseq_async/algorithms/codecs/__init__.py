"""Codecs: they encode an update in few bytes, from which both ends decode the same values."""

from fairseq_async.algorithms.codecs.adacomp import AdaComp
from fairseq_async.algorithms.codecs.adacomp_bins import AdaCompBins
from fairseq_async.algorithms.codecs.bf16 import BF16
from fairseq_async.algorithms.codecs.codec import Codec
from fairseq_async.algorithms.codecs.dqsgd import DQSGD
from fairseq_async.algorithms.codecs.e3m0 import E3M0
from fairseq_async.algorithms.codecs.error_feedback import ErrorFeedback
from fairseq_async.algorithms.codecs.int8 import Int8
from fairseq_async.algorithms.codecs.top_k import TopK

__all__ = ["BF16", "DQSGD", "E3M0", "AdaComp", "AdaCompBins", "Codec", "ErrorFeedback", "Int8", "TopK"]
