"""The options of every method: fairseq's flags, DeepSpeed's keys and PyTorch's arguments are made from them."""
