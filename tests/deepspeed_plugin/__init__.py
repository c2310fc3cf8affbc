"""Of DeepSpeed engines that are workers."""
