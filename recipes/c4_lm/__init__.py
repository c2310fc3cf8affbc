"""C4 language modelling: decoders trained by asynchronous local SGD under DeepSpeed, compared by perplexity."""
