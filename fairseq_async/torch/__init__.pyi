from fairseq_async.algorithms.muon import MuonAdamW as MuonAdamW
from fairseq_async.algorithms.muon import muon_groups as muon_groups
from fairseq_async.pytorch import AsyncLocalSGD as AsyncLocalSGD
from fairseq_async.pytorch import HybridAsync as HybridAsync
from fairseq_async.pytorch import enter_island as enter_island
