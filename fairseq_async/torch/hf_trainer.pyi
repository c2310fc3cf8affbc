from fairseq_async.pytorch.hf_trainer import AsyncCallback as AsyncCallback
