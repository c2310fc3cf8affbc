"""What a ``Trainer`` of transformers needs as a worker of a run, with DeepSpeed and without."""
