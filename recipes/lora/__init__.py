"""Fine-tuning of adapters (PEFT) by workers that exchange the adapter alone."""
