from fairseq_async.pytorch import AsyncLocalSGD as AsyncLocalSGD
from fairseq_async.pytorch import HybridAsync as HybridAsync
