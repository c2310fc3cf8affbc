from fairseq_async.pytorch import AsyncLocalSGD as AsyncLocalSGD
from fairseq_async.pytorch import HybridAsync as HybridAsync
from fairseq_async.pytorch import enter_island as enter_island
