"""On ``PYTHONPATH``: each process of Python uses another attention than cuDNN's."""

import torch

torch.backends.cuda.enable_cudnn_sdp(False)
